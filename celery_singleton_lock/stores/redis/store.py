"""Locks in Redis or Valkey: one hash per lock, one script per verb."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from redis import exceptions

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, PUBLISH_BOUND, RELEASE_BOUND, clock
from celery_singleton_lock.stores.records import (
    Answer,
    Claim,
    Conflict,
    Done,
    Ending,
    Grant,
    Holder,
    Outcome,
    PublishMode,
    Slot,
)
from celery_singleton_lock.stores.redis.connection import REPLY_TIMEOUT, Connections, RetryLoop, pool_of
from celery_singleton_lock.stores.redis.encoding import (
    ACQUIRE,
    CLAIM_SLOT,
    MARK_DONE,
    MARK_QUEUED,
    RELEASE,
    RENEW,
    RENEWALS_PER_SCRIPT,
    UNMARK,
    Script,
    answer_in,
    arguments_of,
    conflict_in,
    mark_text,
    milliseconds,
    release_arguments,
    renewals_of,
)
from celery_singleton_lock.stores.redis.errors import accepted, is_passing
from celery_singleton_lock.stores.redis.inventory import RedisInventory

# A poll takes no more than 24 days at once.
_LONGEST_SLEEP = 3600.0
# Seconds of the bound for listening, so that enough of it is left for the question.
_LISTEN_BOUND = 2.0
# Clocks of two machines drift apart, and network and processes take their time.
_SMALLEST_STEP = 0.5
_WORST_RATE = 0.0001
# Seconds between two comparisons with our own clock.
_COMPARE_EVERY = 1.0
# Longer than a year, for an entry that is due once a year.
_SLOTS_ARE_KEPT = 400 * 24 * 3600.0


class ServerClock:
    """Compares a server's time with the local clock, which never steps."""

    def __init__(self, stepped: Callable[[float], None]) -> None:
        self._stepped = stepped
        self._seen_at = float("-inf")
        # How far the server's clock is ahead of ours, at least and at most.
        self._ahead = float("-inf"), float("inf")

    def compare(self, now: int, sent_at: float) -> None:
        """The server's time was *now*, in microseconds, as it worked on a request that was sent at *sent_at*."""
        if sent_at < self._seen_at + _COMPARE_EVERY:
            return
        answered_at, seconds = clock(), now / 1_000_000
        least_before, most_before = self._ahead
        self._ahead = least, most = seconds - answered_at, seconds - sent_at
        step = max(least - most_before, 0.0) + min(most - least_before, 0.0)
        drift = (answered_at - self._seen_at) * _WORST_RATE
        self._seen_at = answered_at
        if abs(step) > _SMALLEST_STEP + drift:
            self._stepped(step)


class Waiter:
    """A turn in a lock's queue, from `__enter__` until it is granted or `__exit__`; its connection hears the release.

    A waiter that leaves without a grant still has to release the claim, to pass the turn on.
    """

    def __init__(
        self, servers: Connections, claim: Claim, ask: Callable[[float], Grant | Conflict | Done | float]
    ) -> None:
        self._servers, self._claim, self._ask = servers, claim, ask
        self._subscription: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._subscription is not None:
            self._subscription.disconnect()
            self._subscription = None

    def ask(self) -> Grant | Conflict | Done | float:
        """Take the place if it is this one's turn, else return how many seconds to sleep at most.

        A copy may have a conflict with its own run, or be done.
        """
        give_up_at = clock() + ACQUIRE_BOUND
        if self._subscription is None:
            with suppress(exceptions.RedisError):
                channel, bound = f"{self._claim.key}:{self._claim.token}", min(_LISTEN_BOUND, self._claim.patience)
                self._subscription = self._servers.listen(channel, bound)
        return self._ask(give_up_at - clock())

    def sleep(self, seconds: float) -> None:
        """Return when woken by a release, and at the latest after *seconds*."""
        if self._subscription is None:
            # It cannot hear a release, so it looks a little more often; `ask` reports a broken store.
            time.sleep(min(seconds, REPLY_TIMEOUT))
            return
        try:
            is_woken = self._subscription.can_read(timeout=min(seconds, _LONGEST_SLEEP))
            # So a server of a cluster says that the channel has moved; the next `ask` listens there.
            is_over = is_woken and self._subscription.read_response()[0] == "sunsubscribe"
        except exceptions.RedisError:
            is_over = True
        if is_over:
            self.__exit__()


class Store(RedisInventory):
    """Locks in one Redis or Valkey server, or in whichever is Sentinel's master.

    Every call is bounded in time and raises `StoreError` if no usable answer came. Such a call may have worked
    nevertheless, so each is safe to repeat: acquire recognises the token it has already granted, and renew and release
    touch nothing that another token holds. A grant or a renewal counts once so many *replicas* have it.
    """

    has_parts = False
    """It has several parts, each of which answers, or is silent, by itself."""
    on_clock_step: Callable[[float], None] | None = None
    """Called with the seconds by which the store's clock was set, in whichever thread finds out."""
    _renewals_per_script = RENEWALS_PER_SCRIPT
    _asks_once = False

    def __init__(self, url: str, options: Mapping[str, Any], replicas: int = 0) -> None:
        self._url, self._options, self._replicas = url, options, replicas
        self._servers = self._connect(url, options)
        self._loop = RetryLoop(self._servers.address, self._servers.pool.connection_kwargs)
        self._whole = self._loop, ServerClock(self._stepped)

    def _connect(self, url: str, options: Mapping[str, Any]) -> Connections:
        self._asks_once = not self._replicas
        if url.startswith("sentinel://"):
            from celery_singleton_lock.stores.redis.sentinel import SentinelConnections  # noqa: PLC0415 (few use it)

            return SentinelConnections(url, options)
        scheme, _, rest = url.partition("://")
        address = f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
        return Connections(pool_of(url, options, address), address)

    @property
    def address(self) -> str:
        """Where the store is, fit for logs: never with credentials."""
        return self._servers.address

    def part_of(self, key: str) -> Hashable:  # noqa: ARG002 (for a store that has parts)
        """The part of the store that has *key* now."""
        return self

    def clone(self) -> Self:
        return type(self)(self._url, self._options, self._replicas)

    def acquire(self, claim: Claim) -> Grant | Conflict | Done:
        """Take a free place, or return the holders that have them all; a copy first hears of the run of its message."""
        answer = self._acquire(claim)
        assert not isinstance(answer, float)
        return answer

    def waiter(self, claim: Claim) -> Waiter:
        """Queue for a place: first come, first served, woken by the release."""
        return Waiter(self._servers, claim, lambda bound: self._acquire(claim, bound, waits=True))

    def _acquire(
        self, claim: Claim, bound: float = ACQUIRE_BOUND, *, waits: bool = False
    ) -> Grant | Conflict | Done | float:
        arguments, bound, sent_at = arguments_of(claim, waits=waits), min(bound, claim.patience), clock()
        reply = self._ask_once(ACQUIRE, claim.key, arguments, bound)
        if reply is None or isinstance(reply, exceptions.RedisError):
            reply, sent_at = self._acquire_patiently(claim, arguments, bound - (clock() - sent_at), waits=waits)
        self._of(claim.key)[1].compare(reply if type(reply) is int else reply[1], sent_at)
        return answer_in(claim.key, reply, sent_at)

    def _acquire_patiently(
        self, claim: Claim, arguments: Sequence[str], bound: float, *, waits: bool
    ) -> tuple[Any, float]:
        loop, _ = self._of(claim.key)
        if loop.is_away and claim.facts.task_id and not waits:
            # Other calls, each in a slot of a pool, do not try for as long as the first one has.
            bound = min(bound, REPLY_TIMEOUT)
        calls = [((claim.key,), arguments)]
        try:
            (reply,), sent_at = loop.persist(
                lambda left: accepted(self._servers.run(ACQUIRE, calls, left, self._replicas)), bound
            )
        except StoreError:
            loop.is_away = True
            raise
        return reply, sent_at

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        """Restart the ttl of each claim; one answer each, in order.

        `DONE` only if nobody else can have had the place; `REPLACED` and `BROKEN` are as good, but it has to make way.
        Some may have been renewed even if there is no answer.
        """
        calls = list(renewals_of(claims, self._renewals_per_script))
        if not calls:
            return []
        replies, sent_at = self._of(claims[0].key)[0].persist(
            lambda left: accepted(self._servers.run(RENEW, calls, left, self._replicas)), timeout
        )
        for (keys, _), (*_, now) in zip(calls, replies, strict=True):
            self._of(keys[0])[1].compare(now, sent_at)
        return [ANSWERS[answer] for *answers, _ in replies for answer in answers]

    def release(
        self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND, ending: Ending | None = None
    ) -> Answer:
        """Give back the place, or the turn in the queue; if *place* is None, any place or turn that the token has.

        `MARKED` if it was released and *ending* was kept, in the same step; `DONE` if only released. With `TAKEN` and
        `GONE`, if it had been lost before, *ending* was kept as well.
        """
        arguments, sent_at = release_arguments(claim, place, ending), clock()
        reply = self._ask_once(RELEASE, claim.key, arguments, bound)
        if isinstance(reply, int):
            return ANSWERS[reply]
        calls, tries = [((claim.key,), arguments)], int(reply is not None)

        def ask(left: float) -> Any:
            nonlocal tries
            tries += 1
            return accepted(self._servers.run(RELEASE, calls, left))[0]

        reply, _ = self._of(claim.key)[0].persist(ask, bound - (clock() - sent_at))
        if tries > 1 and reply <= 0:
            # An earlier try may have released it, and its answer was lost.
            return Answer.DONE if ending is None else Answer.MARKED
        return ANSWERS[reply]

    def mark_queued(
        self,
        key: str,
        task_id: str,
        seconds: float,
        *,
        limit: int,
        quiet: float,
        label: str = "",
        sent: PublishMode = "",
        published: int = 0,
        due_for: float = 0.0,
    ) -> Holder | None:
        """Mark a call as the one that is queued, for so many seconds, and return None; or the call that is in its way.

        That is the call that is queued or keeps the key quiet; or a run, if *limit* is not 0 and at least so many hold
        the key. From now on no other call of the key is published for *quiet* seconds. *published* is found
        with the mark, as `Holder.published`, and *due_for* as `LeftMark.due_for`.
        """
        in_the_way = f"{limit} {sent}".strip()
        about = mark_text(label, published, due_for)
        arguments = task_id, milliseconds(seconds), in_the_way, milliseconds(quiet), *filter(None, [about])
        reply = self._ask(MARK_QUEUED, key, arguments, PUBLISH_BOUND)
        return None if reply == 1 else conflict_in(key, reply).first

    def unmark(self, key: str, task_id: str, *, quiet: bool = True, heeds: bool = False) -> Conflict | None:
        """End what a call has left: it is queued and next no longer, nor does it keep the key *quiet*.

        If it *heeds*, leave everything if another call is queued, and return the conflict with it.
        """
        words = " ".join(word for word, is_said in {"quiet": quiet, "heeds": heeds}.items() if is_said)
        reply = self._ask(UNMARK, key, (task_id, words))
        return None if reply == 1 else conflict_in(key, reply)

    def mark_done(self, key: str, marker: str, attempt: int, outcome: Outcome, seconds: float) -> None:
        """Write the marker of a message, unless more is known: a later attempt, or the last word on this one."""
        self._ask(MARK_DONE, key, (marker, str(attempt), outcome, milliseconds(seconds)))

    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Claim a slot, or note when it was sent, or forget its entry; False if that was done, or others lead."""
        moments = (str(slot.due), str(slot.fence), str(slot.sent), milliseconds(_SLOTS_ARE_KEPT))
        return bool(self._ask(CLAIM_SLOT, key, (slot.entry, *moments)))

    def slots(self, key: str) -> dict[str, Slot]:
        """The last slot of each entry."""
        fields = self._call("HGETALL", key)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return {entry: Slot(entry, *map(int, value.split(" "))) for entry, value in pairs}

    def close(self) -> None:
        self._servers.close()

    def _of(self, key: str) -> tuple[RetryLoop, ServerClock]:  # noqa: ARG002 (there is one server)
        """The data about the server that has *key*."""
        return self._whole

    def _ask_once(self, script: Script, key: str, arguments: Sequence[str], bound: float) -> Any:
        """The reply of one server that is well, or why there is none; None if a `RetryLoop` has to ask first."""
        if not self._asks_once or self._loop.is_away or bound < 2 * REPLY_TIMEOUT:
            return None
        try:
            (reply,) = self._servers.ask(key, (("EVALSHA", script.digest, "1", key, *arguments),), 2 * REPLY_TIMEOUT)
        except exceptions.RedisError as error:
            if not is_passing(error):
                raise self._loop.unanswered(error) from error
            return error
        self._loop.has_answered = True
        # What was refused was not done.
        return None if isinstance(reply, exceptions.RedisError) else reply

    def _ask(self, script: Script, key: str, arguments: Sequence[str], bound: float = RELEASE_BOUND) -> Any:
        calls = [((key,), arguments)]
        return self._of(key)[0].persist(lambda left: accepted(self._servers.run(script, calls, left))[0], bound)[0]

    def _stepped(self, seconds: float) -> None:
        if self.on_clock_step is not None:
            self.on_clock_step(seconds)


ANSWERS = {int(answer): answer for answer in Answer}
