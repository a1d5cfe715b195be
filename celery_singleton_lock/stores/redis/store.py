"""Locks in Redis or Valkey: one hash per lock, one script per verb."""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from redis import ConnectionPool, exceptions
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, RELEASE_BOUND, Store, clock
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant, Holder, Slot, Succession
from celery_singleton_lock.stores.redis.hash import holders_in, published_in, successor_in, turns_in
from celery_singleton_lock.stores.redis.waiter import RedisWaiter, grant_in
from celery_singleton_lock.stores.redis.wire import REPLY_TIMEOUT, Script, Wire

ACQUIRE, RENEW, RELEASE = Script("acquire"), Script("renew"), Script("release")
MARK_QUEUED, UNMARK, CLAIM_SLOT = Script("mark_queued"), Script("unmark"), Script("claim_slot")

_FIRST_PAUSE = 0.02
# Longer than a year, for the entry that is due once in one.
_SLOTS_ARE_KEPT = 400 * 24 * 3600.0
# A script blocks the server for everybody, so a large renewal goes in parts of about 0.1 ms.
_RENEWALS_PER_SCRIPT = 50

# A new connection tells the server its library's name and version, each a round
# trip that the bounds would have to include. The names of these arguments have changed.
_NO_INTRODUCTION: dict[str, None] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)

_PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
)


class RedisStore(Store):
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
            **_NO_INTRODUCTION,
        }
        try:
            pool = ConnectionPool.from_url(url, **{**options, **ours})
            # Again, because from_url lets what the URL says win.
            pool.connection_kwargs.update(ours)
            pool.connection_class(**pool.connection_kwargs)
        except (TypeError, exceptions.RedisError) as error:
            raise ConfigurationError(f"singleton_lock_url: {_address(url)} cannot be used: {error}") from error
        except ValueError:
            # Without its words, in which a password that was not escaped would stand as the port.
            raise ConfigurationError(
                "singleton_lock_url cannot be read: give redis://user:password@host:port/database, "
                "with any other character in user and password percent-encoded"
            ) from None
        self._url, self._options = url, options
        self._address = _address(url)
        self._wire = Wire(pool)
        self._reserved = Wire(pool)

    @property
    def address(self) -> str:
        """Scheme, host, port and database."""
        return self._address

    def twin(self) -> "RedisStore":
        """Another client of the same server."""
        return RedisStore(self._url, self._options)

    def acquire(self, claim: Claim) -> Grant | Conflict:
        """Run acquire.lua."""
        (verdict, now, *rest), sent_at = self._take(claim, queue=False)
        if verdict == 1:
            return grant_in(rest, sent_at)
        fields = _pairs(rest[0])
        holders = holders_in(claim.key, now, fields) or turns_in(claim.key, now, fields)
        return Conflict(claim.key, tuple(holders), successor_in(now, fields), now)

    def waiter(self, claim: Claim) -> RedisWaiter:
        """Queue with acquire.lua and listen on a channel of its own."""
        return RedisWaiter(self._wire, claim, lambda: self._take(claim, queue=True))

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        """Run renew.lua on a connection that nothing else uses, all parts in one go."""
        calls = list(_renewals(claims))
        replies, _ = self._persist(lambda left: self._reserved.run_many(RENEW, calls, left), timeout)
        return [_ANSWERS[answer] for reply in replies for answer in reply]

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        """Read each token's deadline."""
        commands = [("TIME",), *(("HMGET", claim.key, claim.token, f"!{claim.token}") for claim in claims)]
        (time, *deadlines), _ = self._persist(lambda left: self._reserved.call_many(commands, left), timeout)
        now = _microseconds(time)
        known = [usual or asked_to_make_way for usual, asked_to_make_way in deadlines]
        return [(int(deadline) - now) / 1_000_000 if deadline else None for deadline in known]

    def release(self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND) -> Answer:
        """Run release.lua."""
        arguments = (claim.token, place or 1, place or claim.limit, _milliseconds(claim.min_hold))
        tries = 0

        def ask(timeout: float) -> int:
            nonlocal tries
            tries += 1
            return int(self._wire.run(RELEASE, claim.key, arguments, timeout))

        reply, _ = self._persist(ask, bound)
        # An earlier try may have released it without our hearing of it.
        return Answer.DONE if tries > 1 else _ANSWERS[reply]

    def holders(self, key: str) -> list[Holder]:
        """Read the hash."""
        fields, _ = self._persist(lambda timeout: self._wire.call("HGETALL", key, timeout=timeout), RELEASE_BOUND)
        time, _ = self._persist(lambda timeout: self._wire.call("TIME", timeout=timeout), RELEASE_BOUND)
        return holders_in(key, _microseconds(time), _pairs(fields))

    def successor(self, key: str) -> str | None:
        """Read the hash."""
        fields, _ = self._persist(lambda timeout: self._wire.call("HGETALL", key, timeout=timeout), RELEASE_BOUND)
        return successor_in(0, _pairs(fields))

    def publish(self, key: str, task_id: str, seconds: float, *, counts_running: bool, quiet: float) -> Holder | None:
        """Run mark_queued.lua."""
        arguments = [task_id, _milliseconds(seconds), int(counts_running), _milliseconds(quiet)]
        reply, _ = self._persist(lambda timeout: self._wire.run(MARK_QUEUED, key, arguments, timeout), ACQUIRE_BOUND)
        if reply == 1:
            return None
        _, now, fields = reply
        return published_in(key, now, _pairs(fields))

    def withdraw(self, key: str, task_id: str, *, afresh: bool = False) -> None:
        """Run unmark.lua."""
        self._persist(lambda timeout: self._wire.run(UNMARK, key, [task_id, int(afresh)], timeout), RELEASE_BOUND)

    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Run claim_slot.lua."""
        arguments = (slot.entry, slot.due, slot.fence, slot.sent, _milliseconds(_SLOTS_ARE_KEPT))
        reply, _ = self._persist(lambda timeout: self._wire.run(CLAIM_SLOT, key, arguments, timeout), RELEASE_BOUND)
        return bool(reply)

    def slots(self, key: str) -> dict[str, Slot]:
        """Read the hash."""
        fields, _ = self._persist(lambda timeout: self._wire.call("HGETALL", key, timeout=timeout), RELEASE_BOUND)
        return {entry: Slot(entry, *map(int, value.split(" "))) for entry, value in _pairs(fields).items()}

    def note(self, key: str, text: str, seconds: float) -> None:
        """SET with an expiry."""
        command = ("SET", key, text, "PX", _milliseconds(seconds))
        self._persist(lambda timeout: self._wire.call(*command, timeout=timeout), RELEASE_BOUND)

    def noted(self, key: str) -> str | None:
        """GET."""
        text: str | None = self._persist(lambda timeout: self._wire.call("GET", key, timeout=timeout), RELEASE_BOUND)[0]
        return text

    def close(self) -> None:
        """Close the idle connections."""
        self._wire.close()
        self._reserved.close()

    def _take(self, claim: Claim, *, queue: bool) -> tuple[list[Any], float]:
        task_id = claim.facts.get("task_id", "")
        facts = [part for fact in claim.facts.items() for part in fact]
        wish = claim.succession or Succession("skip")
        policy = "queue" if queue else wish.policy
        arguments = (
            *(claim.token, _milliseconds(claim.ttl), claim.limit, policy, task_id),
            *(wish.arguments, wish.asked_at, int(claim.queued), *facts),
        )
        reply, sent_at = self._persist(
            lambda timeout: self._wire.run(ACQUIRE, claim.key, arguments, timeout), ACQUIRE_BOUND
        )
        if reply[0] == -1:
            raise ConfigurationError(
                f"lock_limit={claim.limit} is not allowed for key={claim.key}: it is held under "
                f"lock_limit={reply[2]}; give all who share the key the same limit"
            )
        return reply, sent_at

    def _persist(self, ask: Callable[[float], Any], bound: float) -> tuple[Any, float]:
        """Ask until there is an answer, for *bound* seconds at most, all tries together.

        Returns:
            The answer, and the time at which the request it belongs to was sent.
        """
        give_up_at = clock() + bound
        pause = _FIRST_PAUSE
        while True:
            sent_at = clock()
            try:
                return ask(give_up_at - sent_at), sent_at
            except exceptions.RedisError as error:
                passing = isinstance(error, _PASSING) and not isinstance(error, exceptions.AuthenticationError)
                if not passing or clock() + pause >= give_up_at:
                    raise self._unanswered(error) from error
            time.sleep(pause)
            pause *= 2

    def _unanswered(self, error: exceptions.RedisError) -> StoreError:
        return StoreError(self._address, f"{type(error).__name__}: {error}")


_ANSWERS = {int(answer): answer for answer in Answer}


def _renewals(claims: Sequence[Claim]) -> Iterator[tuple[list[str], list[Any]]]:
    # Claims of one ttl come together already, except where tasks with different ones are due at once.
    for ttl, alike in groupby(claims, key=lambda claim: claim.ttl):
        group = list(alike)
        for start in range(0, len(group), _RENEWALS_PER_SCRIPT):
            part = group[start : start + _RENEWALS_PER_SCRIPT]
            yield [claim.key for claim in part], [_milliseconds(ttl), *[claim.token for claim in part]]


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _microseconds(time: Sequence[str]) -> int:
    """What TIME has answered."""
    return int(time[0]) * 1_000_000 + int(time[1])


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _address(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
