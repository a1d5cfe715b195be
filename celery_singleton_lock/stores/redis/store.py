"""Locks in Redis or Valkey: one hash per lock, one script per verb."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

from redis import exceptions

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, PUBLISH_BOUND, RELEASE_BOUND, Store, Waiter, clock
from celery_singleton_lock.stores.records import (
    Answer,
    Claim,
    Conflict,
    Done,
    Ending,
    Grant,
    Holder,
    Outcome,
    Sent,
    Slot,
)
from celery_singleton_lock.stores.redis.asking import Asking
from celery_singleton_lock.stores.redis.clock import ServerClock
from celery_singleton_lock.stores.redis.hash import (
    arguments_of,
    conflict_in,
    grant_in,
    microseconds,
    milliseconds,
    release_arguments,
    renewals_of,
)
from celery_singleton_lock.stores.redis.inventory import RedisInventory
from celery_singleton_lock.stores.redis.opening import REPLY_TIMEOUT
from celery_singleton_lock.stores.redis.refusals import OVERWRITTEN, accepted
from celery_singleton_lock.stores.redis.replicas import Replicas
from celery_singleton_lock.stores.redis.script import Script
from celery_singleton_lock.stores.redis.source import Source, source_of
from celery_singleton_lock.stores.redis.trial import in_other_slots, try_out
from celery_singleton_lock.stores.redis.waiter import RedisWaiter
from celery_singleton_lock.stores.redis.wire import WatchfulWire, Wire

ACQUIRE = Script("acquire")
RELEASE = Script("release")
RENEW = Script("renew")
MARK_QUEUED = Script("mark_queued")
UNMARK = Script("unmark")
MARK_DONE = Script("mark_done")
CLAIM_SLOT = Script("claim_slot")

# Longer than a year, for an entry that is due once a year.
_SLOTS_ARE_KEPT = 400 * 24 * 3600.0


class RedisStore(RedisInventory, Store):
    """Locks in one Redis or Valkey server, or in whichever is Sentinel's master.

    Arguments:
        url: `redis://`, `rediss://` or `unix://`, as redis-py reads it, or `sentinel://`.
        options: Further arguments for redis-py's connections. Timeouts and
            retries cannot be set: the bounds of the contract rest on them.
        replicas: How many replicas must have a grant or a renewal before it counts.

    Raises:
        ConfigurationError: The URL or an option is not one that redis-py knows.
    """

    # One server that stays where it is, and whose word is enough.
    _is_plain = False

    def __init__(self, url: str, options: Mapping[str, Any], replicas: int = 0) -> None:
        self._url, self._options = url, options
        self._replicas = Replicas(replicas) if replicas else None
        self._clock = ServerClock(self._stepped)
        self._connect(url, options)

    def _connect(self, url: str, options: Mapping[str, Any]) -> None:
        self._source = self._source_of(url, options)
        self._asking = Asking(self._source.address, self._source.pool.connection_kwargs)
        kind = WatchfulWire if self._source.may_move else Wire
        self._is_plain = kind is Wire and self._replicas is None
        self._wire = kind(self._source, self._reconnected)
        self._reserved = kind(self._source, self._reconnected)

    def _source_of(self, url: str, options: Mapping[str, Any]) -> Source:
        return source_of(url, options, self.close, self._reconnected)

    @property
    def address(self) -> str:
        """Scheme, host, port and database; of Sentinel, all hosts and the name of the master."""
        return self._source.address

    def twin(self) -> Self:
        """Another client of the same store."""
        return type(self)(self._url, self._options, self._replicas.number if self._replicas else 0)

    def try_out(self, key: str, bound: float, ttls: Iterable[float] = ()) -> None:
        """Use each command, run acquire.lua and release.lua, and listen."""
        give_up_at = clock() + bound
        others = [] if self.has_parts else in_other_slots(key)
        self._asking.persist(lambda timeout: try_out(self._wire, ACQUIRE, RELEASE, key, timeout, others), bound)
        if (replicas := self._replicas) is not None:
            self._asking.persist(partial(replicas.try_out, self._wire, key), give_up_at - clock())
        self._source.weigh(ttls)

    def now(self) -> int:
        """Ask the server for its time."""
        return microseconds(self._asking.persist(lambda left: self._wire.call("TIME", timeout=left), RELEASE_BOUND)[0])

    def acquire(self, claim: Claim) -> Grant | Conflict | Done:
        """Run acquire.lua."""
        reply, began_at = None, clock()
        if self._is_plain and not (self._clock.is_behind or self._asking.is_away) and claim.patience > REPLY_TIMEOUT:
            # If there is no usable answer, it is asked for again.
            with suppress(exceptions.RedisError):
                reply = self._wire.once(ACQUIRE, claim.key, arguments_of(claim))
                if type(reply) is int and self._clock.goes_on(reply, began_at):
                    return Grant(1, reply, took_over=False, since=reply / 1_000_000, sent_at=began_at)
                if type(reply) is list and reply[0] not in (GRANTED, _DONE):
                    reply = self._believed(reply, claim.key)
        if reply is None:
            answer = self._take(claim, ACQUIRE_BOUND - (clock() - began_at))
        else:
            answer = self._answer(claim, reply, began_at)
        assert not isinstance(answer, float)
        return answer

    def waiter(self, claim: Claim) -> Waiter:
        """Queue with acquire.lua and listen on a channel of its own."""
        return RedisWaiter(self._wire, claim, lambda bound: self._take(claim, bound, waits=True))

    def renew(self, claims: Sequence[Claim], timeout: float) -> Sequence[Answer | StoreError]:
        """Run renew.lua on a connection that nothing else uses, all parts in one go."""
        run = self._reserved.run_many if self._replicas is None else partial(self._replicas.run_many, self._reserved)
        replies, sent_at = self._asking.persist(lambda left: run(RENEW, list(renewals_of(claims)), left), timeout)
        if replies:
            self._clock.tells(replies[-1][-1], sent_at)
        self._source.weigh(claim.ttl for claim in claims)
        return [ANSWERS[answer] for *answers, _ in replies for answer in answers]

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        """Read each token's deadline."""
        commands = [("TIME",), *(("HMGET", claim.key, claim.token, f"!{claim.token}") for claim in claims)]
        ask = partial(self._reserved.replies_to, commands)
        (time, *deadlines), _ = self._asking.persist(lambda left: accepted(ask(left), OVERWRITTEN), timeout)
        known = [None if isinstance(each, Exception) else each[0] or each[1] for each in deadlines]
        return [(int(deadline) - microseconds(time)) / 1_000_000 if deadline else None for deadline in known]

    def release(
        self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND, ending: Ending | None = None
    ) -> Answer:
        """Run release.lua, until the next waiters have been told."""
        arguments = release_arguments(claim, place, ending)
        tries = 0
        if self._is_plain and bound > REPLY_TIMEOUT:
            try:
                reply = self._wire.once(RELEASE, claim.key, arguments)
                if type(reply) is int:
                    return ANSWERS[reply]
            except exceptions.RedisError as error:
                # A refusal has released nothing; without an answer, it may have.
                tries = 0 if isinstance(error, exceptions.ResponseError) else 1
                bound -= tries * REPLY_TIMEOUT

        def ask(timeout: float) -> Any:
            nonlocal tries
            tries += 1
            return self._wire.run(RELEASE, [claim.key], arguments, timeout)

        reply, _ = self._of(claim.key)[0].persist(ask, bound)
        answer = ANSWERS[reply[0] if isinstance(reply, list) else reply]
        if isinstance(reply, list):
            self._wake_the_rest(claim, bound)
        if tries > 1 and answer <= 0:
            # An earlier try may have released it, and its answer was lost.
            return Answer.DONE if ending is None else Answer.MARKED
        return answer

    def _wake_the_rest(self, claim: Claim, bound: float) -> None:
        give_up_at = clock() + bound
        # It is released even if this fails. Waiters look after their turn by themselves, if rarely.
        with suppress(StoreError):
            while isinstance(self._ask(RELEASE, claim.key, (claim.token, "0", "0 0")), list):
                if clock() > give_up_at:
                    break

    def mark_queued(
        self, key: str, task_id: str, seconds: float, *, limit: int, quiet: float, label: str = "", sent: Sent = ""
    ) -> Holder | None:
        """Run mark_queued.lua."""
        in_the_way = f"{limit} {sent}".strip()
        arguments = task_id, milliseconds(seconds), in_the_way, milliseconds(quiet), *filter(None, [label])
        try:
            reply = self._ask(MARK_QUEUED, key, arguments, PUBLISH_BOUND)
        except StoreError:
            # From far away, opening takes longer than a caller who publishes may wait.
            self._wire.open_ahead()
            raise
        return None if reply == 1 else conflict_in(key, reply).first

    def unmark(self, key: str, task_id: str, *, quiet: bool = True, heeds: bool = False) -> Conflict | None:
        """Run unmark.lua."""
        words = " ".join(word for word, is_said in {"quiet": quiet, "heeds": heeds}.items() if is_said)
        reply = self._ask(UNMARK, key, (task_id, words))
        return None if reply == 1 else conflict_in(key, reply)

    def mark_done(self, key: str, marker: str, attempt: int, outcome: Outcome, seconds: float) -> None:
        """Run mark_done.lua."""
        self._ask(MARK_DONE, key, (marker, str(attempt), outcome, milliseconds(seconds)))

    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Run claim_slot.lua."""
        moments = (str(slot.due), str(slot.fence), str(slot.sent), milliseconds(_SLOTS_ARE_KEPT))
        return bool(self._ask(CLAIM_SLOT, key, (slot.entry, *moments)))

    def slots(self, key: str) -> dict[str, Slot]:
        """Read the hash."""
        fields = self._call("HGETALL", key)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return {entry: Slot(entry, *map(int, value.split(" "))) for entry, value in pairs}

    def close(self) -> None:
        """Close the idle connections."""
        self._wire.close()
        self._reserved.close()

    def _take(
        self, claim: Claim, bound: float = ACQUIRE_BOUND, *, waits: bool = False
    ) -> Grant | Conflict | Done | float:
        asking, seen = self._of(claim.key)
        lowest = seen.lowest_fence()
        arguments = arguments_of(claim, waits=waits, lowest_fence=lowest)

        def ask(timeout: float) -> Any:
            return self._ask_for_place([claim.key], arguments, timeout)

        # A `Lock`, and a run with a turn in the queue, persists.
        is_one_of_many = bool(claim.facts.task_id) and not waits
        try:
            reply, sent_at = asking.persist(ask, min(bound, claim.patience), is_one_of_many=is_one_of_many)
        except StoreError as error:
            if not isinstance(error, ConfigurationError):
                # From far away, opening may take longer than a caller with a time limit may wait.
                self._wire.open_ahead()
            raise
        return self._answer(claim, reply, sent_at, bound, is_above=bool(lowest))

    def _believed(self, conflict: Any, key: str) -> Any:
        """The conflict, or None if it may be that of a former master: it writes nothing, so old data may report it."""
        try:
            self._wire.make_sure(key, REPLY_TIMEOUT)
        except exceptions.RedisError:
            return None
        return conflict

    def _answer(
        self, claim: Claim, reply: Any, sent_at: float, bound: float = ACQUIRE_BOUND, *, is_above: bool = False
    ) -> Grant | Conflict | Done | float:
        _, seen = self._of(claim.key)
        seen.tells(reply if isinstance(reply, int) else reply[1], sent_at)
        if isinstance(reply, int) or reply[0] == GRANTED:
            grant = grant_in(reply, sent_at)
            return grant if seen.has_given(grant.fence) or is_above else self._take_above(claim, bound, grant)
        if reply[0] == _QUEUED:
            return float(reply[2]) / 1_000_000
        return Done(*reply[2:]) if reply[0] == _DONE else conflict_in(claim.key, reply)

    def _of(self, key: str) -> tuple[Asking, ServerClock]:  # noqa: ARG002 (there is one server)
        """The data about the server that has *key*."""
        return self._asking, self._clock

    def _ask_for_place(self, keys: Sequence[str], arguments: Sequence[str], timeout: float) -> Any:
        give_up_at = clock() + timeout
        if self._replicas is None:
            reply = self._wire.run(ACQUIRE, keys, arguments, timeout)
        else:
            reply, acknowledged = self._replicas.run(self._wire, ACQUIRE, keys, arguments, timeout)
            if isinstance(reply, int) or reply[0] == GRANTED:
                self._replicas.check(acknowledged)
        if not isinstance(reply, int) and reply[0] not in (GRANTED, _QUEUED, _DONE):
            # A conflict writes nothing, so a former master could report one from its old data.
            self._wire.make_sure(keys[0], give_up_at - clock())
        return reply

    def _take_above(self, claim: Claim, bound: float, grant: Grant) -> Grant | Conflict | Done | float:
        """Ask again for a higher fence, because the first grant has shown that the server's clock was set back."""
        again = self._take(claim, bound)
        return replace(again, took_over=grant.took_over) if isinstance(again, Grant) else again

    def _ask(self, script: Script, key: str, arguments: Sequence[str], bound: float = RELEASE_BOUND) -> Any:
        return self._of(key)[0].persist(lambda timeout: self._wire.run(script, [key], arguments, timeout), bound)[0]

    def _reconnected(self) -> None:
        if self.on_reconnect is not None:
            self.on_reconnect()

    def _stepped(self, seconds: float) -> None:
        if self.on_clock_step is not None:
            self.on_clock_step(seconds)


GRANTED, _QUEUED, _DONE = 1, 2, 3
ANSWERS = {int(answer): answer for answer in Answer}
