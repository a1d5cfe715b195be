"""Connections to Redis on which every call is bounded and none waits for another."""

import hashlib
import os
from collections import deque
from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis import ConnectionPool, exceptions

from celery_singleton_lock.stores.base import clock

REPLY_TIMEOUT = 1.0
_SHORTEST_TIMEOUT = 0.01


class Script:
    """A Lua file of this package, behind the parts it needs, called by its digest.

    Arguments:
        verb: What it does; the name of the file.
        parts: The files in `lua/parts` that come before it, in this order.
    """

    def __init__(self, verb: str, *parts: str) -> None:
        files = [*(f"parts/{part}" for part in parts), verb]
        folder = resources.files(__package__).joinpath("lua")
        self.text = "\n".join(folder.joinpath(f"{file}.lua").read_text(encoding="utf-8") for file in files)
        self.digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class Wire:
    """Connections to one server, kept while they are idle.

    redis-py's client retries for up to a minute by default and shares a bounded
    pool. A heartbeat can afford neither, so this uses redis-py's connections
    and its parser directly and leaves retrying to the caller.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque()
        self._ears: deque[Any] = deque()
        self._pid = os.getpid()

    def call(self, *command: Any, timeout: float = REPLY_TIMEOUT) -> Any:
        """Send one command and return its reply within *timeout* seconds, raising redis-py's errors."""
        connection = self._checkout(timeout)
        try:
            connection.send_command(*command, check_health=False)
            if min(timeout, connection.socket_timeout) < REPLY_TIMEOUT:
                # The call is in a hurry, or the one was that has opened the connection.
                _hear(connection, min(timeout, REPLY_TIMEOUT))
            reply = connection.read_response()
        except exceptions.ResponseError:
            self._idle.append(connection)
            raise
        except exceptions.ConnectionError:
            # What ended this one, a restart say, has ended the idle ones as well.
            connection.disconnect()
            self.close()
            raise
        except BaseException:
            # A reply may still be under way: the next caller on this connection
            # would read it as the answer to another question.
            connection.disconnect()
            raise
        self._idle.append(connection)
        return reply

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any], timeout: float) -> Any:
        """Run a script, sending its text only if the server does not know it."""
        try:
            return self.call("EVALSHA", script.digest, str(len(keys)), *keys, *arguments, timeout=timeout)
        except exceptions.NoScriptError:
            # After a restart, a failover or SCRIPT FLUSH; EVAL loads it again.
            return self.call("EVAL", script.text, str(len(keys)), *keys, *arguments, timeout=timeout)

    def run_many(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Any]]], timeout: float
    ) -> list[Any]:
        """Run a script several times in one round trip, within *timeout* seconds."""
        give_up_at = clock() + timeout
        calls = [(str(len(keys)), *keys, *arguments) for keys, arguments in calls]
        try:
            return self.call_many([("EVALSHA", script.digest, *call) for call in calls], give_up_at - clock())
        except exceptions.NoScriptError:
            return self.call_many([("EVAL", script.text, *call) for call in calls], give_up_at - clock())

    def subscribe(self, channel: str) -> Any:
        """A connection that hears *channel*; the caller disconnects it or hands it to `unsubscribe`."""
        self._drop_the_parents()
        if self._ears:
            try:
                return _hear_only(self._ears.pop(), channel)
            except exceptions.RedisError:
                # What ended this one, a restart say, has ended the others as well.
                self.close()
        return _hear_only(self._open(REPLY_TIMEOUT), channel)

    def unsubscribe(self, connection: Any) -> None:
        """Keep *connection* for the next `subscribe`; until then it hears a channel that nobody uses any more."""
        self._ears.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        for idle in (self._idle, self._ears):
            while idle:
                idle.pop().disconnect()

    def call_many(self, commands: Sequence[Sequence[Any]], timeout: float) -> list[Any]:
        """Send all commands in one round trip and return their replies, within *timeout* seconds."""
        give_up_at = clock() + timeout
        connection = self._checkout(timeout)
        try:
            for command in commands:
                connection.send_command(*command, check_health=False)
            replies = []
            for _ in commands:
                _hear(connection, give_up_at - clock())
                replies.append(connection.read_response())
        except BaseException:
            # After an error too, because the replies behind it are still unread.
            connection.disconnect()
            raise
        self._idle.append(connection)
        return replies

    def _checkout(self, timeout: float) -> Any:
        self._drop_the_parents()
        try:
            return self._idle.pop()
        except IndexError:
            return self._open(timeout)

    def _drop_the_parents(self) -> None:
        """After a fork: the sockets belong to the parent, so they are dropped unread."""
        if self._pid != os.getpid():
            self._idle, self._ears, self._pid = deque(), deque(), os.getpid()

    def _open(self, timeout: float) -> Any:
        """Make a connection that takes *timeout* seconds at most to open and to hear a first reply."""
        # Connect, AUTH, SELECT and the command itself each wait on their own.
        each = min(REPLY_TIMEOUT, max(_SHORTEST_TIMEOUT, timeout / 4))
        timeouts = {"socket_timeout": each, "socket_connect_timeout": each}
        return self._pool.connection_class(**{**self._pool.connection_kwargs, **timeouts})


def _hear(connection: Any, timeout: float) -> None:
    if not connection.can_read(timeout=max(0.0, timeout)):
        raise exceptions.TimeoutError("no reply in time")


def _hear_only(connection: Any, channel: str) -> Any:
    try:
        connection.send_command("UNSUBSCRIBE", check_health=False)
        connection.send_command("SUBSCRIBE", channel, check_health=False)
        while connection.read_response()[:2] != ["subscribe", channel]:
            pass
    except BaseException:
        connection.disconnect()
        raise
    return connection
