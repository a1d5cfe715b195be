"""Waiting in line for a lock, and the life of a turn.

A `Lock` or a run in its slot listens by a `bell`, and asks for the lock again. For messages, the main process keeps a
`Line`, which listens, looks whether their turns have come, and lets them go to the pool.

Scripts write the state of a turn. The last column names who runs the script:

    COMING   its worker listens for it, and looks          WAITING   the thread of that worker's `Line`
    COMING   nobody listens after two seconds              UNHEARD   a release, or whoever finds a place free
    COMING   it is woken, or finds a place free            WOKEN     a release, whoever finds a place free, its `Line`
    COMING   it asks by itself, and is granted             SERVED    its run
    COMING   ended, given up, broken, or its time is over  GONE      whoever ends it; a person; any walk along the line
    WAITING  it is woken, or finds a place free            WOKEN     a release, whoever finds a place free, its `Line`
    WAITING  it is woken, and nobody listens any more      UNHEARD   a release, or whoever finds a place free
    WAITING  it asks by itself, and is refused             COMING    its run, as its countdown is over
    WAITING  it asks by itself, and is granted             SERVED    its run; or the process in which it waits
    WAITING  as above                                      GONE
    WOKEN    it is refused: another one was faster         COMING    its run
    WOKEN    another one was faster                        WAITING   the process in which it waits; its `Line`
    WOKEN    it is granted                                 SERVED    its run
    WOKEN    it has not come after three seconds           UNHEARD   any walk along the line
    WOKEN    as above                                      GONE
    UNHEARD  a worker, or its process, listens again       WAITING   the thread of the worker's `Line`; that process
    UNHEARD  the same, and it finds a place free           WOKEN     the thread of that worker's `Line`
    UNHEARD  it comes, and is refused                      COMING    its run
    UNHEARD  it comes, and is granted                      SERVED    its run
    UNHEARD  as above                                      GONE

A turn begins as WAITING if its process already listens for it, otherwise as COMING. While a turn is UNHEARD, others are
woken instead, and the turn keeps its position. A turn that the store has lost begins again, at its old rank.

A wake-up may get lost, or a holder may die. The first turn of each lock in a process therefore looks once in a ttl. If
the turn is among the next few, or the process may not listen, the turn looks every two seconds.
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

# The scripts' word that wakes a turn. At any other word, such as `near`, the thread looks.
_FREE = "free"
_SOON = 2.0
# Seconds until the next look after a message was let go: another place may be free.
_AT_ONCE = 0.25
_SHORTEST = 0.01
# The timeout of a socket is at most 24 days.
_LONGEST_SLEEP = 3600.0
# Seconds that a waiter's request waits for its subscription: a release in between would find no listener.
_LISTENS_WITHIN = 2.0


@dataclass(eq=False)
class InLine:
    """A waiting message; whoever keeps it says what happens when its turn comes."""

    store: Store
    claim: Claim  # the claim that its run will make
    timeout: float  # seconds that the call waits from its first refusal, by the store's clock
    lock: "_OfOneLock | None" = field(default=None, init=False)  # while it is in line

    @property
    def is_new(self) -> bool:
        """The message has no turn yet, and takes one when it looks."""
        return not self.claim.rank and self.claim.turn_for > 0.0

    def come(self) -> None:
        """Let the message go. Any thread may call this, so it must not block or log."""

    def has_turn(self, conflict: Conflict) -> bool:  # noqa: ARG002 (of whoever keeps the message)
        """Hear that a new message has a turn. False: the message has gone meanwhile."""
        return True

    def is_expected(self) -> bool:
        """A run of this process is about to take the place that a new message finds free: the message stays."""
        return False


@dataclass(eq=False)
class _OfOneLock:
    by_channel: dict[str, list[InLine]] = field(default_factory=dict)  # two deliveries of a message have one channel
    looks_at: float = float("inf")
    # When new messages first found a place free. They have no turns, so nobody wakes them.
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
        # No script wakes a turn when a cool-down or a dead holder's lease ends, but that moment is known.
        return min(_SOON, max(_SHORTEST, position.free_in))
    # A process that may not listen does not hear that a turn has come near.
    return _SOON if store.listener.is_refused else claim.ttl


def pause_before(claim: Claim, give_up_at: float) -> float:
    """Seconds for which a waiter in this process waits for its subscription before it asks."""
    return min(_LISTENS_WITHIN, claim.patience, give_up_at - clock())


def pause_after(answer: Verdict, claim: Claim, store: Store, give_up_at: float) -> float:
    """Seconds until a waiter in this process asks again unless it is woken before; 0.0 if it waits no longer."""
    if not isinstance(answer, Conflict) or answer.is_own:
        return 0.0
    return max(0.0, min(give_up_at - clock(), _looks_again_in(answer, claim, store)))


@contextmanager
def bell(store: Store, channel: str) -> Iterator[Callable[[float], None]]:
    """Yield `wait(seconds)` for a thread or greenlet. A ring of *channel* ends the wait, even an earlier ring."""

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
    """Messages that wait in this process, and the thread that looks for their turns and alone changes `_locks`."""

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
                # Its turn may have been woken before this process listened.
                self.put(partial(self._look, one))

    def _look(self, one: InLine) -> None:
        lock = one.lock
        if lock is None:
            return
        pause = _SOON
        try:
            pause = self._act_on(one.store.look(one.claim), one, lock)
        except SingletonLockError:
            # New messages have no turn to lose. Their runs ask, and report the error if it persists.
            for each in [each for lock in self._locks.values() for each in lock.all if each.is_new]:
                self._wake(each)
        finally:
            self._look_within(lock, pause)

    def _act_on(self, answer: Position | Verdict, one: InLine, lock: _OfOneLock) -> float:
        """Wake *one* if it must come. Returns seconds until the lock's first messages look again."""
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
        # No walk along the line, which would cost a crowd of new messages the square of their number.
        for each in islice(lock.found_free, 1):
            # The place is not free for the next new message, either.
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
