"""Locks in the memory of one process, by the same contract: for tests and eager mode.

It is also the model that the scripts for Redis are checked against.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from celery_singleton_lock.stores.base import RELEASE_BOUND, Store
from celery_singleton_lock.stores.memory.admission import Admission, in_the_way
from celery_singleton_lock.stores.memory.clock import SteadyClock
from celery_singleton_lock.stores.memory.described import described
from celery_singleton_lock.stores.memory.inventory import MemoryInventory
from celery_singleton_lock.stores.memory.lock import Lock, Mark, Place, in_force
from celery_singleton_lock.stores.memory.markers import Markers
from celery_singleton_lock.stores.memory.succession import rerun, supersede
from celery_singleton_lock.stores.memory.waiter import MemoryWaiter
from celery_singleton_lock.stores.records import (
    Answer,
    Claim,
    Conflict,
    Done,
    Ending,
    Grant,
    Holder,
    Look,
    Needed,
    Outcome,
    Sent,
    Slot,
    Succession,
    Turn,
)

Result = TypeVar("Result")


class MemoryStore(MemoryInventory, Store):
    """Locks of this process only.

    Arguments:
        now: The store's clock, in seconds since the epoch; by default a steady one.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._clock = SteadyClock()
        self._now = now or self._clock
        self._locks: dict[str, Lock] = {}
        self._markers = Markers()
        self._slots: dict[str, dict[str, Slot]] = {}
        self._counts, self._batches = {}, {}
        self._fence = 0
        self.releases: int = 0
        self._guard = threading.RLock()
        # One for each waiter. Not a condition, whose methods are not safe if a signal may raise.
        self._bells: set[threading.Lock] = set()

    @property
    def address(self) -> str:
        """The URL."""
        return "memory://"

    def twin(self) -> "MemoryStore":
        """This store itself: there are no connections."""
        return self

    def try_out(self, key: str, bound: float, ttls: Iterable[float] = ()) -> None:
        """Return: a store in memory refuses nothing."""

    def close(self) -> None:
        """There are no connections."""

    def now(self) -> int:
        """The time on its clock."""
        return round(self._now() * 1_000_000)

    def acquire(self, claim: Claim) -> Grant | Conflict | Done:
        """Take a place, if one is free and it is nobody else's turn."""
        answer = self._take(claim, waits=False)
        assert not isinstance(answer, float)
        return answer

    def waiter(self, claim: Claim) -> MemoryWaiter:
        """Queue for a place."""
        return MemoryWaiter(self, claim)

    def queue(self, claim: Claim) -> Grant | Conflict | Done | float:
        """Take the place, or a turn; then tell how long to sleep at most."""
        return self._take(claim, waits=True)

    def listen(self, seen: int, seconds: float) -> None:
        """Return once more than *seen* releases have happened, or after so long."""
        bell = threading.Lock()
        bell.acquire()
        with self._guard:
            if self.releases > seen:
                return
            self._bells.add(bell)
        try:
            bell.acquire(timeout=seconds)
        finally:
            self._bells.discard(bell)

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:  # noqa: ARG002 (memory answers at once)
        """Restart the ttl of each claim."""
        with self._guard:
            return [self._renew(claim) for claim in claims]

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:  # noqa: ARG002
        """Look at each claim's place."""
        with self._guard:
            return [self._remaining(claim) for claim in claims]

    def release(
        self,
        claim: Claim,
        place: int | None,  # noqa: ARG002 (it is found by its token)
        bound: float = RELEASE_BOUND,  # noqa: ARG002
        ending: Ending | None = None,
    ) -> Answer:
        """Give a place or a turn back, and wake all who wait."""
        with self._guard:
            lock, now = self._lock(claim.key), self._now()
            answer, left = Answer.GONE, None
            if lock is not None:
                turn = lock.turn_of(claim.token)
                answer = Answer.TAKEN if turn is None else Answer.DONE
                if turn is not None:
                    lock.leave_queue(turn)
                number = lock.place_of(claim.token)
                if number is not None:
                    answer, left = Answer.DONE, lock.places[number]
                    lock.leave_place(number, claim.min_hold, now)
                    if ending is not None:
                        lock.forget_merged(left)
                self._delete_if_idle(claim.key)
            # In any case: a signal may have broken off the release before.
            self._wake()
            return self._leave_marker(claim, ending, answer, left)

    def look(self, key: str) -> Look:
        """The holders of *key*, and those that come next."""
        with self._guard:
            lock, now = self._lock(key), self._now()
            if lock is None:
                return Look((), None, self.now(), 0)
            successor = in_force(lock.successor, now)
            return Look(
                tuple(described(lock.alive(now), now)),
                successor.task_id if successor else None,
                self.now(),
                len(lock.crowd),
            )

    def mark_queued(
        self, key: str, task_id: str, seconds: float, *, limit: int, quiet: float, label: str = "", sent: Sent = ""
    ) -> Holder | None:
        """Mark it, or find the call that is in the way."""

        def mark(lock: Lock, now: float) -> Holder | None:
            other = in_the_way(key, lock, task_id, limit, now, sent)
            if other is None:
                lock.mark_queued(Mark(task_id, now + seconds, label=label), quiet, now)
            return other

        return self._with_lock(key, mark)

    def succeed(
        self, claim: Claim, policy: Succession, task_name: str, arguments: str, memory: float
    ) -> tuple[Turn, str | None] | None:
        """Become the successor, or find the one that runs in its place."""
        if policy == "rerun":
            return self._with_lock(claim.key, lambda lock, now: rerun(lock, claim, task_name, arguments, memory, now))
        return self._with_lock(claim.key, lambda lock, now: supersede(lock, claim, task_name, memory, now))

    def unmark(
        self, key: str, task_id: str, *, quiet: bool = True, returns: bool = False, unless: Sequence[Needed] = ()
    ) -> bool:
        """Forget what the call has left."""

        def forget(lock: Lock, now: float) -> bool:
            if lock.needs(task_id, unless, now):
                return False
            lock.unmark(task_id, quiet=quiet)
            if returns:
                lock.crowd.discard(task_id)
            return True

        return self._with_lock(key, forget)

    def mark_done(self, marker: str, attempt: int, outcome: Outcome, seconds: float) -> None:
        """Keep it until its time has come."""
        with self._guard:
            self._markers.note(marker, attempt, outcome, seconds, self._now())

    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Claim or note it."""
        with self._guard:
            slots = self._slots.setdefault(key, {})
            if (known := slots.get(slot.entry)) is not None:
                done = not slot.sent and known.sent >= known.due >= slot.due
                if known.fence > slot.fence or done:
                    return False
                slot = replace(slot, sent=slot.sent or known.sent)
            slots[slot.entry] = slot
            return True

    def slots(self, key: str) -> dict[str, Slot]:
        """The slots that are known."""
        return dict(self._slots.get(key, {}))

    def clear(self) -> None:
        """Forget everything, as a restart without data does."""
        with self._guard:
            for known in (self._locks, self._markers, self._slots, self._counts):
                known.clear()
            self._wake()

    def advance(self, seconds: float) -> None:
        """Let time pass for everything in the store: leases, marks and cool-downs end, and waiters look again."""
        with self._guard:
            self._clock.advance(seconds)
            self._wake()

    def reset(self) -> None:
        """Make the store as new, for the next test."""
        self._clock.reset()
        self.clear()

    def _wake(self) -> None:
        self.releases += 1
        for bell in tuple(self._bells):
            # It may ring already.
            with suppress(RuntimeError):
                bell.release()

    def _lock(self, key: str) -> Lock | None:
        lock = self._locks.get(key)
        if lock is not None and lock.expiry <= self._now():
            del self._locks[key]
            return None
        return lock

    def _with_lock(self, key: str, do: Callable[[Lock, float], Result]) -> Result:
        """A block with the lock: made if it is missing, dropped at the end if it is empty.

        Not a context manager: a signal that raises as one is entered would leave the guard taken.
        """
        with self._guard:
            result = do(self._lock(key) or self._locks.setdefault(key, Lock()), self._now())
            self._delete_if_idle(key)
        return result

    def _delete_if_idle(self, key: str) -> None:
        lock = self._locks.get(key)
        if lock is not None and lock.is_idle(self._now()):
            del self._locks[key]

    def _take(self, claim: Claim, *, waits: bool) -> Grant | Conflict | Done | float:
        def ask(lock: Lock, now: float) -> Grant | Conflict | Done | float:
            admission = Admission(lock, claim, now, lambda: self._next_fence(now), waits=waits)
            if claim.may_be_copy:
                answer = self._markers.done(claim, now) or admission.held_by_itself() or admission.waits_by_itself()
                if answer is not None:
                    return answer
            return admission.answer()

        return self._with_lock(claim.key, ask)

    def _next_fence(self, now: float) -> int:
        # The clock of this process may stand still between two grants; the clock of a server does not.
        self._fence = max(self._fence + 1, int(now * 1_000_000))
        return self._fence

    def _leave_marker(self, claim: Claim, ending: Ending | None, answer: Answer, left: Place | None) -> Answer:
        """For a place that was lost, nobody knows whether a copy has come, so the marker is left then, too."""
        is_lost = answer is not Answer.DONE
        if ending is None or not (is_lost or ending.is_due or (left is not None and left.copy_has_come)):
            return answer
        self._markers.note(claim.marker, claim.facts.attempt, ending.outcome, ending.kept, self._now())
        return answer if is_lost else Answer.MARKED

    def _renew(self, claim: Claim) -> Answer:
        lock = self._lock(claim.key)
        if lock is None:
            return Answer.GONE
        number = lock.place_of(claim.token)
        if number is None:
            return Answer.TAKEN
        return lock.renew(lock.places[number], claim.ttl, self._now())

    def _remaining(self, claim: Claim) -> float | None:
        lock = self._lock(claim.key)
        number = lock.place_of(claim.token) if lock is not None else None
        return lock.places[number].deadline - self._now() if lock is not None and number is not None else None
