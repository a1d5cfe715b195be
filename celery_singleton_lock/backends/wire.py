"""Connections to Redis on which every call is bounded and none waits for another."""

import hashlib
import os
from collections import deque
from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis import ConnectionPool, exceptions

from celery_singleton_lock.backends.base import clock

REPLY_TIMEOUT = 1.0


class Script:
    """A Lua file of this package, called by its digest."""

    def __init__(self, verb: str) -> None:
        self.text = resources.files(__package__).joinpath("lua", f"{verb}.lua").read_text(encoding="utf-8")
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
        self._pid = os.getpid()

    def call(self, *command: Any) -> Any:
        """Send one command and return its reply, raising redis-py's errors."""
        connection = self._checkout()
        try:
            connection.send_command(*command, check_health=False)
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
            # A reply may still be under way: whoever got this connection next
            # would read it as the answer to another question.
            connection.disconnect()
            raise
        self._idle.append(connection)
        return reply

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script, sending its text only if the server does not know it."""
        try:
            return self.call("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except exceptions.NoScriptError:
            # After a restart, a failover or SCRIPT FLUSH; EVAL loads it again.
            return self.call("EVAL", script.text, len(keys), *keys, *arguments)

    def run_many(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Any]]], timeout: float
    ) -> list[Any]:
        """Run a script several times in one round trip, within *timeout* seconds."""
        give_up_at = clock() + timeout
        try:
            return self._pipe("EVALSHA", script.digest, calls, give_up_at)
        except exceptions.NoScriptError:
            return self._pipe("EVAL", script.text, calls, give_up_at)

    def subscribe(self, channel: str) -> Any:
        """A connection of the caller's own that hears *channel*; whoever asks for it disconnects it."""
        connection = self._open()
        try:
            connection.send_command("SUBSCRIBE", channel, check_health=False)
            connection.read_response()
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().disconnect()

    def _pipe(
        self, verb: str, name: str, calls: Sequence[tuple[Sequence[str], Sequence[Any]]], give_up_at: float
    ) -> list[Any]:
        connection = self._checkout()
        try:
            for keys, arguments in calls:
                connection.send_command(verb, name, len(keys), *keys, *arguments, check_health=False)
            replies = [_read_by(connection, give_up_at) for _ in calls]
        except BaseException:
            # After an error too, because the replies behind it are still unread.
            connection.disconnect()
            raise
        self._idle.append(connection)
        return replies

    def _checkout(self) -> Any:
        if self._pid != os.getpid():
            # Forked: the sockets belong to the parent, so drop them unread.
            self._idle, self._pid = deque(), os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()

    def _open(self) -> Any:
        return self._pool.connection_class(**self._pool.connection_kwargs)


def _read_by(connection: Any, give_up_at: float) -> Any:
    if not connection.can_read(timeout=max(0.0, give_up_at - clock())):
        raise exceptions.TimeoutError("no reply in time")
    return connection.read_response()
