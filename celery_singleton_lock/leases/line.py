"""Waiting in line for a lock, and the life of a turn.

A `Lock`, or a run that waits in its pool slot, listens by a `bell`, and asks again when the bell rings or a pause ends.
A message waits in the `Line` of its worker's main process. The `Line` listens, looks whether the turn has come, and
sends the message to the pool. A wake-up may be lost, and a dead holder wakes nobody, so the first turn of each lock in
a process also looks by itself.

A turn belongs to a call or a `Lock`, its owner, and scripts write its state. The turn of a message whose run was
refused begins as COMING, any other turn as WAITING:

    COMING   the message is on its way to a worker
    WAITING  a process listens for the turn
    WOKEN    a place is free, and the owner should ask within three seconds
    UNHEARD  nobody came when the turn was woken; others are woken instead, but it keeps its position
    SERVED   the owner has the lock, and the turn is deleted
    GONE     the turn is deleted

What leads from one state to another:

    COMING   the `Line` looks, and no place is free                              WAITING
    COMING   woken and heard, or the `Line` finds a place free                   WOKEN
    COMING   woken two seconds or more after the refusal, and nobody listens     UNHEARD
    COMING   the owner asks, and gets the lock                                   SERVED
    COMING   the owner ends or is broken, or the turn expires                    GONE
    WAITING  woken and heard, or the `Line` finds a place free                   WOKEN
    WAITING  woken, and nobody listens any more                                  UNHEARD
    WAITING  the message's countdown ends, and its run is refused                COMING
    WAITING  the owner asks, and gets the lock                                   SERVED
    WAITING  the owner ends or is broken, or the turn expires                    GONE
    WOKEN    another was faster, and the run is refused                          COMING
    WOKEN    another was faster, and the process still listens                   WAITING
    WOKEN    the owner has not asked after three seconds                         UNHEARD
    WOKEN    the owner asks, and gets the lock                                   SERVED
    WOKEN    the owner ends or is broken, or the turn expires                    GONE
    UNHEARD  a process listens again, and no place is free                       WAITING
    UNHEARD  the `Line` listens again, and finds a place free                    WOKEN
    UNHEARD  the run is refused                                                  COMING
    UNHEARD  the owner asks, and gets the lock                                   SERVED
    UNHEARD  the owner ends or is broken, the turn expires, or the line is full  GONE

If the store has lost a turn, the owner's next request makes it again, at its old rank.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import islice

from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.leases.background import Background
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Conflict, Position, Verdict
from celery_singleton_lock.stores.redis.store import Store

# The word that wakes a turn. After any other word, such as `near`, the `Line` asks the store.
_FREE = "free"
_SOON = 2.0
# Seconds until the next look after a message has gone to the pool.
_AT_ONCE = 0.25
_SHORTEST = 0.01
# The timeout of a socket is at most 24 days.
_LONGEST_SLEEP = 3600.0
# A waiter asks once its subscription stands, at the latest after these seconds. A waiter that asked earlier could miss
# the wake-up of a release.
_LISTENS_WITHIN = 2.0


@dataclass(eq=False)
class InLine:
    """A waiting message. A subclass says how it goes to the pool."""

    store: Store
    claim: Claim  # like the claim that the run of the message will make
    timeout: float  # seconds from the first refusal, by the store's clock
    lock: "_OfOneLock | None" = field(default=None, init=False)  # while it is in line

    @property
    def is_new(self) -> bool:
        """The message has no turn yet."""
        return not self.claim.rank and self.claim.turn_for > 0.0

    def come(self) -> None:
        """Send the message to the pool. Any thread may call this, so it must not block or log."""

    def has_turn(self, conflict: Conflict) -> bool:  # noqa: ARG002 (for subclasses)
        """Called when a new message gets a turn. Returns False if the message has gone meanwhile."""
        return True

    def is_expected(self) -> bool:
        """Whether a run that this worker has just sent to the pool will take the free place."""
        return False


@dataclass(eq=False)
class _OfOneLock:
    by_channel: dict[str, list[InLine]] = field(default_factory=dict)  # two deliveries of a message share a channel
    looks_at: float = float("inf")
    # When each new message first found a place free. No script wakes a message that has no turn, so the `Line` looks
    # again soon.
    found_free: dict[InLine, float] = field(default_factory=dict)

    @property
    def all(self) -> list[InLine]:
        return [each for ones in self.by_channel.values() for each in ones]

    @property
    def first(self) -> list[InLine]:
        new = self.found_free or (each for each in self.all if each.is_new)
        turns = (each for each in self.all if not each.is_new)
        return [*islice(new, 1), *nsmallest(1, turns, key=_rank_of)]


def _rank_of(one: InLine) -> tuple[int, int, str]:
    claim = one.claim
    return claim.rank, claim.published, claim.task_id


def _looks_again_in(position: Position | Conflict, claim: Claim, store: Store) -> float:
    if position.is_near:
        # No script wakes the turn when a cool-down or a dead holder's lease ends, so look at that moment.
        return min(_SOON, max(_SHORTEST, position.free_in))
    return _SOON if store.listener.is_refused else claim.ttl


def pause_before(claim: Claim, give_up_at: float) -> float:
    return min(_LISTENS_WITHIN, claim.patience, give_up_at - clock())


def pause_after(answer: Verdict, claim: Claim, store: Store, give_up_at: float) -> float:
    """Seconds until a waiter asks again unless it is woken. 0.0 ends the wait."""
    if not isinstance(answer, Conflict) or answer.is_own:
        return 0.0
    return max(0.0, min(give_up_at - clock(), _looks_again_in(answer, claim, store)))


@contextmanager
def bell(store: Store, channel: str) -> Iterator[Callable[[float], None]]:
    """Yield `wait(seconds)`, which ends early if *channel* rings, or has rung since the last wait."""

    def ring(_: str) -> None:
        # A full socket has woken its reader already, and a closed one has none.
        with suppress(OSError):
            rings.send(b".")

    def wait(seconds: float) -> None:
        hears.settimeout(min(max(seconds, _SHORTEST), _LONGEST_SLEEP))
        with suppress(TimeoutError):
            hears.recv(4096)

    hears, rings = socket.socketpair()
    with hears, rings:
        rings.setblocking(False)
        try:
            store.listener.add(channel, ring)
            yield wait
        finally:
            store.listener.remove(channel, at_once=False)


class Line(Background):
    """The messages that wait in this process. Only its own thread changes `_locks`."""

    def __init__(self) -> None:
        self._locks: dict[tuple[Store, str], _OfOneLock] = {}
        super().__init__(lambda: bool(self._locks))

    def add(self, one: InLine) -> None:
        self.submit(partial(self._add, one))

    def remove(self, one: InLine) -> None:
        self.submit(partial(self._remove, one))

    def has(self, store: Store, key: str) -> bool:
        return (store, key) in self._locks

    def _add(self, one: InLine) -> None:
        lock = one.lock = self._locks.setdefault((one.store, one.claim.key), _OfOneLock())
        ones = lock.by_channel.setdefault(one.claim.channel, [])
        ones.append(one)
        if len(ones) == 1:
            one.store.listener.add(one.claim.channel, partial(self._heard, ones))
        self._look_within(lock, _SOON)

    def _remove(self, one: InLine) -> None:
        lock, one.lock = one.lock, None
        if lock is None:
            return
        ones = lock.by_channel[one.claim.channel]
        ones.remove(one)
        lock.found_free.pop(one, None)
        if not ones:
            del lock.by_channel[one.claim.channel]
            one.store.listener.remove(one.claim.channel)
        if not lock.by_channel:
            del self._locks[one.store, one.claim.key]

    def _heard(self, ones: list[InLine], text: str) -> None:
        for one in tuple(ones):
            if text == _FREE:
                self._wake(one)
            else:
                self.put(partial(self._look, one))

    def _look(self, one: InLine) -> None:
        lock = one.lock
        if lock is None:
            return
        pause = _SOON
        try:
            pause = self._act_on(one.store.look(one.claim), one, lock)
        except SingletonLockError:
            # Let all new messages go to the pool: they have no turns to lose. Their runs report the error if it lasts.
            for each in [each for lock in self._locks.values() for each in lock.all if each.is_new]:
                self._wake(each)
        finally:
            self._look_within(lock, pause)

    def _act_on(self, answer: Position | Verdict, one: InLine, lock: _OfOneLock) -> float:
        """Wake *one* if its run must ask now. Returns seconds until the next look."""
        if isinstance(answer, Conflict) and answer.rank:
            self._begin_turn(one, answer, lock)
            return _looks_again_in(answer, one.claim, one.store)
        if isinstance(answer, Position):
            if one.is_new and one.is_expected():
                waited = clock() - lock.found_free.setdefault(one, clock())
                return min(_AT_ONCE, max(_SHORTEST, waited / 2))
            has_time = one.is_new or answer.at < one.claim.refused_at + one.timeout * 1_000_000
            if has_time and not answer.comes:
                return _looks_again_in(answer, one.claim, one.store)
        # A place is free, the time is over, the line is full, or another delivery of the message runs or has run.
        self._wake(one)
        return _AT_ONCE

    def _begin_turn(self, one: InLine, conflict: Conflict, lock: _OfOneLock) -> None:
        # The store has found no other run of the message.
        one.claim.may_be_copy = False
        one.claim.rank = one.claim.refused_at = conflict.rank
        if not one.has_turn(conflict):
            one.store.unmark(one.claim.key, one.claim.task_id, ends_cooldown=False)
        lock.found_free.pop(one, None)
        # The next new message may have found the same place free. It looks again, and takes a turn, too. Do not use
        # `lock.first` here, which may walk over all messages.
        for each in islice(lock.found_free, 1):
            self.put(partial(self._look, each))

    def _wake(self, one: InLine) -> None:
        one.come()
        self.put(partial(self._remove, one))

    def _look_within(self, lock: _OfOneLock, seconds: float) -> None:
        at = clock() + seconds
        if at < lock.looks_at:
            lock.looks_at = at
            self.submit(partial(self._look_by_itself, lock, at), seconds)

    def _look_by_itself(self, lock: _OfOneLock, at: float) -> None:
        if lock.looks_at == at:
            lock.looks_at = float("inf")
            for one in lock.first:
                self._look(one)
