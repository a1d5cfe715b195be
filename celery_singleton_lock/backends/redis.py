"""Locks in Redis or Valkey: one hash per lock, one script per verb."""

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from redis import ConnectionPool, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.backends.base import (
    ACQUIRE_BOUND,
    RELEASE_BOUND,
    Answer,
    Backend,
    Claim,
    Conflict,
    Grant,
    Holder,
    clock,
    holders_from,
)
from celery_singleton_lock.errors import BackendError, ConfigurationError

REPLY_TIMEOUT = 1.0

# The longest one try can take: connect, AUTH, SELECT and the reply itself.
_LONGEST_TRY = 3 * REPLY_TIMEOUT
_FIRST_PAUSE = 0.02
# One script blocks the server for everybody, so a large renewal goes in parts.
_RENEWALS_PER_SCRIPT = 100

_PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
)


class Script:
    """A Lua file of this package, called by its digest."""

    def __init__(self, verb: str) -> None:
        self.text = resources.files(__package__).joinpath("lua", f"{verb}.lua").read_text(encoding="utf-8")
        self.digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ACQUIRE, RENEW, RELEASE = Script("acquire"), Script("renew"), Script("release")


class Wire:
    """Connections to one server; every call is bounded, and none waits for a connection.

    redis-py's client retries for up to a minute by default and shares a bounded
    pool. A heartbeat can afford neither, so this uses redis-py's connections
    and its parser directly and leaves retrying to the caller.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque()
        self._pid = os.getpid()

    def call(self, *command: Any, timeout: float = REPLY_TIMEOUT) -> Any:
        """Send one command and return its reply, raising redis-py's errors."""
        connection = self._checkout()
        try:
            connection.send_command(*command, check_health=False)
            if timeout < REPLY_TIMEOUT and not connection.can_read(timeout=timeout):
                raise exceptions.TimeoutError(f"no reply within {timeout:.2f} s")
            reply = connection.read_response()
        except exceptions.ResponseError:
            self._idle.append(connection)
            raise
        except BaseException:
            # A reply may still be under way: whoever got this connection next
            # would read it as the answer to another question.
            connection.disconnect()
            raise
        self._idle.append(connection)
        return reply

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().disconnect()

    def _checkout(self) -> Any:
        if self._pid != os.getpid():
            # Forked: the sockets belong to the parent, so drop them unread.
            self._idle, self._pid = deque(), os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self._pool.connection_class(**self._pool.connection_kwargs)


class RedisBackend(Backend):
    """Locks in one Redis or Valkey server.

    Arguments:
        url: `redis://`, `rediss://` or `unix://`, as redis-py reads it.
        options: Further arguments for redis-py's connections. Timeouts and
            retries cannot be set: the bounds of the contract rest on them.

    Raises:
        ConfigurationError: The URL or an option is not one that redis-py knows.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        ours = {
            "socket_timeout": REPLY_TIMEOUT,
            "socket_connect_timeout": REPLY_TIMEOUT,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "decode_responses": True,
            "protocol": 2,
        }
        try:
            pool = ConnectionPool.from_url(url, **{**options, **ours})
            # Again, because from_url lets what the URL says win.
            pool.connection_kwargs.update(ours)
            pool.connection_class(**pool.connection_kwargs)
        except (TypeError, ValueError, exceptions.RedisError) as error:
            raise ConfigurationError(f"singleton_lock_url: {_address(url)} cannot be used: {error}") from error
        self._address = _address(url)
        self._wire = Wire(pool)
        self._reserved = Wire(pool)

    @property
    def address(self) -> str:
        """Scheme, host, port and database."""
        return self._address

    def acquire(self, claim: Claim) -> Grant | Conflict:
        """Run acquire.lua."""
        facts = [part for fact in claim.facts.items() for part in fact]
        arguments = (claim.token, _milliseconds(claim.ttl), claim.limit, *facts)
        reply, sent_at = self._persist(lambda: _run(self._wire, ACQUIRE, (claim.key,), arguments), ACQUIRE_BOUND)
        verdict, now, *rest = reply
        if verdict == 1:
            place, fence, took_over, since = rest
            return Grant(place, fence, bool(took_over), since / 1_000_000, sent_at)
        if verdict == 0:
            fields = dict(zip(rest[::2], rest[1::2], strict=True))
            return Conflict(claim.key, tuple(holders_from(claim.key, now, fields)))
        raise ConfigurationError(
            f"lock_limit={claim.limit} is not allowed for key={claim.key}: it is held under lock_limit={rest[0]}; "
            "give all tasks that share the key the same limit"
        )

    def renew(self, renewals: Sequence[tuple[Claim, int]], timeout: float) -> list[Answer]:
        """Run renew.lua on a connection that nothing else uses."""
        answers: list[Answer] = []
        give_up_at = clock() + timeout
        for start in range(0, len(renewals), _RENEWALS_PER_SCRIPT):
            part = renewals[start : start + _RENEWALS_PER_SCRIPT]
            keys = [claim.key for claim, _ in part]
            arguments = [value for claim, place in part for value in (claim.token, place, _milliseconds(claim.ttl))]
            remaining = min(REPLY_TIMEOUT, max(0.0, give_up_at - clock()))
            try:
                reply = _run(self._reserved, RENEW, keys, arguments, remaining)
            except exceptions.RedisError as error:
                raise self._unanswered(error) from error
            answers += map(Answer, reply[1:])
        return answers

    def release(self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND) -> Answer:
        """Run release.lua."""
        arguments = (claim.token, place or 1, place or claim.limit)
        reply, _ = self._persist(lambda: _run(self._wire, RELEASE, (claim.key,), arguments), bound)
        return Answer(reply)

    def holders(self, key: str) -> list[Holder]:
        """Read the hash."""
        fields, _ = self._persist(lambda: self._wire.call("HGETALL", key), RELEASE_BOUND)
        (seconds, microseconds), _ = self._persist(lambda: self._wire.call("TIME"), RELEASE_BOUND)
        now = int(seconds) * 1_000_000 + int(microseconds)
        return holders_from(key, now, dict(zip(fields[::2], fields[1::2], strict=True)))

    def close(self) -> None:
        """Close the idle connections."""
        self._wire.close()
        self._reserved.close()

    def _persist(self, ask: Callable[[], Any], bound: float) -> tuple[Any, float]:
        """Ask until there is an answer, as long as one more try fits the bound.

        Returns:
            The answer, and the time at which the request it belongs to was sent.
        """
        last_start = clock() + max(0.0, bound - _LONGEST_TRY)
        pause = _FIRST_PAUSE
        while True:
            sent_at = clock()
            try:
                return ask(), sent_at
            except exceptions.RedisError as error:
                passing = isinstance(error, _PASSING) and not isinstance(error, exceptions.AuthenticationError)
                if not passing or clock() + pause > last_start:
                    raise self._unanswered(error) from error
            time.sleep(pause)
            pause *= 2

    def _unanswered(self, error: exceptions.RedisError) -> BackendError:
        return BackendError(self._address, f"{type(error).__name__}: {error}")


def _run(
    wire: Wire, script: Script, keys: Sequence[str], arguments: Sequence[Any], timeout: float = REPLY_TIMEOUT
) -> Any:
    try:
        return wire.call("EVALSHA", script.digest, len(keys), *keys, *arguments, timeout=timeout)
    except exceptions.NoScriptError:
        # After a restart, a failover or SCRIPT FLUSH; EVAL loads it again.
        return wire.call("EVAL", script.text, len(keys), *keys, *arguments, timeout=timeout)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _address(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
