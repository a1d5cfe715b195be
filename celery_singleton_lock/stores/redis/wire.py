"""Connections to Redis on which every call is bounded and none waits for another."""

import _thread
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

from redis import exceptions

from celery_singleton_lock.stores.base import ACQUIRE_BOUND, clock
from celery_singleton_lock.stores.redis.opening import REPLY_TIMEOUT, abort, hear, shut
from celery_singleton_lock.stores.redis.packing import pack_command, packed, packed_together
from celery_singleton_lock.stores.redis.refusals import is_elsewhere
from celery_singleton_lock.stores.redis.script import Script
from celery_singleton_lock.stores.redis.source import Source

T = TypeVar("T")

# Seconds after which an idle connection is one too many.
LONGEST_IDLE = 60.0
LOOK_AGAIN = 6.0
# A reply that may take a moment longer than the rest of the time is waited for as usual, because to look for it
# first costs as much as another system call.
_A_MOMENT = 0.01
# Seconds for which a server that was a master still counts as one.
_SURE_FOR = 1.0


class Wire:
    """Connections to the server that keeps the locks, kept while they are idle.

    redis-py's client retries for up to a minute by default and shares a bounded
    pool. A heartbeat can afford neither, so this uses redis-py's connections
    and its parser directly and leaves retrying to the caller.

    Arguments:
        source: Opens connections.
        reconnected: Called when there is a connection again after one was lost.
    """

    # The commands that start and stop listening.
    _verbs = "SUBSCRIBE", "UNSUBSCRIBE"

    def __init__(self, source: Source, reconnected: Callable[[], None]) -> None:
        self._source = source
        self._reconnected = reconnected
        self._begin()

    def _begin(self) -> None:
        # Each with the time since when it is idle; the one that was used last is used first.
        self._idle: deque[tuple[Any, float]] = deque()
        self._ears: deque[tuple[Any, float]] = deque()
        self._listening: WeakSet[Any] = WeakSet()
        self._look_at = clock() + LOOK_AGAIN
        self._opens_until = 0.0
        self._has_lost_one = False
        self._pid = os.getpid()

    @property
    def address(self) -> str:
        """The address of the server, fit for logs."""
        return self._source.address

    def once(self, script: Script, key: str, arguments: Sequence[str]) -> Any:
        """Run a script over an idle connection, and nothing else: the usual path.

        Returns:
            The reply; None if there is no idle connection.

        Raises:
            RedisError: There is no usable reply. The script may have run all the same.
        """
        if self._pid != os.getpid():
            return None
        try:
            connection, idle_since = self._idle.pop()
        except IndexError:
            return None
        command = "EVALSHA", script.digest, "1", key, *arguments
        request = pack_command(command)
        # Other types need the encoding of the connection.
        request = [request] if request.isascii() else connection.pack_command(*command)
        try:
            connection.send_packed_command(request, check_health=False)
            reply = connection.read_response()
        except exceptions.ResponseError as error:
            self._put_back_after(error, connection)
            raise
        except BaseException as error:
            # A reply may still be under way: the next caller would read it as the answer to another question.
            abort(connection)
            self._drop_others(error, idle_since)
            raise
        now = clock()
        self._idle.append((connection, now))
        if now > self._look_at:
            self._look_at = now + LOOK_AGAIN
            self._close_idle(until=now - LONGEST_IDLE)
        return reply

    def call(self, *command: str, timeout: float = REPLY_TIMEOUT) -> Any:
        """Send one command and return its reply within *timeout* seconds, raising redis-py's errors."""
        connection, idle_since, timeout = self._checkout(timeout)
        try:
            connection.send_packed_command(packed(connection, command), check_health=False)
            if timeout < REPLY_TIMEOUT - _A_MOMENT:
                hear(connection, timeout)
            reply = connection.read_response()
        except exceptions.ResponseError as error:
            self._put_back_after(error, connection)
            raise
        except BaseException as error:
            # A reply may still be under way: the next caller on this connection
            # would read it as the answer to another question.
            abort(connection)
            self._drop_others(error, idle_since)
            raise
        self._put_back(connection)
        return reply

    def call_many(self, commands: Sequence[Sequence[str]], timeout: float) -> list[Any]:
        """Send all commands in one round trip and return their replies, within *timeout* seconds."""
        replies = self.replies_to(commands, timeout)
        for reply in replies:
            if isinstance(reply, exceptions.ResponseError):
                raise reply
        return replies

    def replies_to(self, commands: Sequence[Sequence[str]], timeout: float) -> list[Any]:
        """The same, but a refusal is a reply as well, so that the other replies are not lost."""
        give_up_at = clock() + timeout
        connection, idle_since, _ = self._checkout(timeout)
        try:
            connection.send_packed_command(packed_together(connection, commands), check_health=False)
            replies = [_reply(connection, give_up_at) for _ in commands]
        except BaseException as error:
            abort(connection)
            self._drop_others(error, idle_since)
            raise
        refusals = [reply for reply in replies if isinstance(reply, exceptions.ResponseError)]
        if refusals:
            self._put_back_after(refusals[0], connection)
        else:
            self._put_back(connection)
        return replies

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[str], timeout: float) -> Any:
        """Run a script, sending its text only if the server does not know it."""
        give_up_at = clock() + timeout
        try:
            return self.call("EVALSHA", script.digest, str(len(keys)), *keys, *arguments, timeout=timeout)
        except exceptions.NoScriptError:
            # After a restart, a failover or SCRIPT FLUSH; EVAL loads it again.
            call = "EVAL", script.text, str(len(keys)), *keys, *arguments
            return self.call(*call, timeout=give_up_at - clock())

    def at(self, key: str, ask: Callable[["Wire", float], T], timeout: float) -> T:  # noqa: ARG002 (there is one server)
        """The result of *ask* at the server that has *key*; *ask* gets connections to it, and its seconds."""
        return ask(self, timeout)

    def spelled(self, script: Script) -> Script:
        """*script* in the form for this server."""
        return script

    def to_masters(self, timeout: float) -> list["Wire"]:  # noqa: ARG002 (it is known)
        """Connections to each server that has locks."""
        return [self]

    def run_many(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str]]], timeout: float
    ) -> list[Any]:
        """Run a script several times in one round trip, within *timeout* seconds."""
        give_up_at = clock() + timeout
        plain = [(str(len(keys)), *keys, *arguments) for keys, arguments in calls]
        known = [("EVALSHA", script.digest, *call) for call in plain]
        try:
            return self.call_many(known, timeout)
        except exceptions.NoScriptError:
            # The first call loads it for the others.
            return self.call_many([("EVAL", script.text, *plain[0]), *known[1:]], give_up_at - clock())

    def run_all(
        self, commands: Sequence[Sequence[str]], calls: Sequence[tuple[Script, str, Sequence[str]]], timeout: float
    ) -> None:
        """Send commands, then run scripts, each on one key; one round trip, or two if the server does not know all."""
        give_up_at = clock() + timeout
        known = [("EVALSHA", one.digest, "1", key, *args) for one, key, args in calls]
        try:
            self.call_many([*commands, *known], timeout)
        except exceptions.NoScriptError:
            self.call_many([("EVAL", one.text, "1", key, *args) for one, key, args in calls], give_up_at - clock())

    def make_sure(self, key: str, timeout: float) -> None:
        """Ask the connection that was used last whether its server is a master, unless it was asked just now.

        Raises:
            RedisError: It is not, or does not answer.
        """
        with suppress(IndexError):
            connection, _ = self._idle[-1]
            if clock() < connection.sure_until:
                return
            connection.sure_until = clock() + _SURE_FOR
        try:
            # No lock has such a field: a master does nothing, and any other server says what it is.
            self.call("HDEL", key, "", timeout=timeout)
        except exceptions.ResponseError as error:
            if is_elsewhere(error):
                raise

    def subscribe(self, channel: str, timeout: float) -> Any:
        """A connection that hears *channel*; the caller disconnects it or hands it to `unsubscribe`."""
        self._drop_the_parents()
        give_up_at = clock() + timeout
        with suppress(IndexError):
            connection, idle_since = self._ears.pop()
            try:
                return self._hear_only(connection, channel, give_up_at)
            except exceptions.RedisError as error:
                self._drop_others(error, idle_since)
        return self._hear_only(self._open(give_up_at - clock()), channel, give_up_at)

    def unsubscribe(self, connection: Any) -> None:
        """Keep *connection* for the next `subscribe`; until then it hears a channel that nobody uses any more."""
        self._listening.discard(connection)
        self._ears.append((connection, clock()))

    def open_ahead(self) -> None:
        """In the background, open a connection for the next call, unless there is one or one is being opened."""
        self._drop_the_parents()
        if not self._idle and clock() >= self._opens_until:
            # A time, because a signal may raise before the thread has begun.
            self._opens_until = clock() + ACQUIRE_BOUND
            _thread.start_new_thread(self._open_and_keep, ())

    def close(self) -> None:
        """Close the idle connections."""
        self._close_idle(until=float("inf"))

    def _checkout(self, timeout: float) -> tuple[Any, float, float]:
        """A connection, the time since when it was idle, and the rest of *timeout*."""
        self._drop_the_parents()
        try:
            return *self._idle.pop(), timeout
        except IndexError:
            give_up_at = clock() + timeout
            connection = self._open(timeout)
            return connection, float("-inf"), max(0.0, give_up_at - clock())

    def _open(self, timeout: float) -> Any:
        connection = self._source.open(timeout)
        if self._has_lost_one:
            self._has_lost_one = False
            self._reconnected()
        return connection

    def _open_and_keep(self) -> None:
        # If it fails, the next call opens its own, and tells.
        with suppress(Exception):
            self._put_back(self._open(ACQUIRE_BOUND))
        self._opens_until = 0.0

    def _drop_the_parents(self) -> None:
        """After a fork: the sockets belong to the parent, so they are dropped unread."""
        if self._pid != os.getpid():
            self._begin()

    def _put_back(self, connection: Any) -> None:
        now = clock()
        self._idle.append((connection, now))
        if now > self._look_at:
            self._look_at = now + LOOK_AGAIN
            self._close_idle(until=now - LONGEST_IDLE)

    def _put_back_after(self, error: exceptions.ResponseError, connection: Any) -> None:
        """Keep a connection whose server has said no, unless it is the wrong server."""
        if is_elsewhere(error):
            connection.disconnect()
            self._drop_others(error, float("inf"))
        else:
            self._put_back(connection)

    def _drop_others(self, error: BaseException, idle_since: float) -> None:
        """Close the other connections that the cause of *error* has ended as well; *error* was on an idle one."""
        if not isinstance(error, exceptions.RedisError):
            return
        self._has_lost_one = True
        # A restart, for example, has ended the others, too. But if a connection fell silent, close only those that
        # were not used since: a router has forgotten them all, or the server is just slow.
        self._close_idle(until=idle_since if isinstance(error, exceptions.TimeoutError) else float("inf"))
        if is_elsewhere(error):
            for ear in list(self._listening):
                # The waiter closes it, and then listens at the right server.
                shut(ear)

    def _close_idle(self, until: float) -> None:
        """Close the connections that were not used since *until*."""
        for idle in (self._idle, self._ears):
            with suppress(IndexError):
                while idle[0][1] <= until:
                    idle.popleft()[0].disconnect()

    def _hear_only(self, connection: Any, channel: str, give_up_at: float) -> Any:
        try:
            hear_it, hear_nothing = self._verbs
            commands = connection.pack_commands([(hear_nothing,), (hear_it, channel)])
            connection.send_packed_command(commands, check_health=False)
            self._listening.add(connection)
            reply = None
            while reply != [hear_it.lower(), channel]:
                hear(connection, min(REPLY_TIMEOUT, give_up_at - clock()))
                reply = connection.read_response()[:2]
        except BaseException:
            connection.disconnect()
            raise
        return connection


class WatchfulWire(Wire):
    """The same to a server that another one may replace while it still answers."""

    def _checkout(self, timeout: float) -> tuple[Any, float, float]:
        self._source.look_again()
        return super()._checkout(timeout)


def _reply(connection: Any, give_up_at: float) -> Any:
    """The next reply; a refusal is one, because the replies behind it have to be read as well."""
    if (left := give_up_at - clock()) < REPLY_TIMEOUT - _A_MOMENT:
        hear(connection, left)
    try:
        return connection.read_response()
    except exceptions.ResponseError as error:
        return error
