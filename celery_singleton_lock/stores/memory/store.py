"""Locks in the memory of one process, by the same contract: for tests and eager mode.

It is also the model that the scripts for Redis are checked against.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.base import RELEASE_BOUND, Store, clock, lock_name_of
from celery_singleton_lock.stores.memory.lock import Lock, Place, Turn, successors_claim
from celery_singleton_lock.stores.memory.waiter import MemoryWaiter
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant, Holder, Slot

_GRACE = 2.0


class MemoryStore(Store):
    """Locks of this process only.

    Arguments:
        now: The store's clock, in seconds since the epoch.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._locks: dict[str, Lock] = {}
        self._notes: dict[str, tuple[str, float]] = {}
        self._slots: dict[str, dict[str, Slot]] = {}
        self._fence = 0
        self.releases = 0
        self._changed = threading.Condition()

    @property
    def address(self) -> str:
        """The URL."""
        return "memory://"

    def twin(self) -> "MemoryStore":
        """This one: there are no connections."""
        return self

    def acquire(self, claim: Claim) -> Grant | Conflict:
        """Take a free place whose turn it is nobody else's."""
        with self._changed:
            answer = self._take(claim)
            if isinstance(answer, Grant):
                return answer
            lock, now = self._locks[claim.key], self._now()
            if claim.succession is not None:
                lock.ask_to_succeed(claim, claim.succession, now)
            held = [self._holder(p) for p in lock.places.values() if p.deadline > now]
            turns = [self._turn(turn) for turn in lock.queue if turn.deadline > now]
            following = lock.successor
            before = [mark for mark in (following, lock.queued) if mark is not None and mark.deadline > now]
            turns[:0] = [self._turn(Turn(successors_claim(claim.key, mark), mark.deadline)) for mark in before]
            holders = tuple(sorted(held, key=lambda holder: holder.expires_in) or turns)
            return Conflict(claim.key, holders, following.task_id if following else None, int(now * 1_000_000))

    def successor(self, key: str) -> str | None:
        """Who is next."""
        with self._changed:
            lock = self._lock(key)
            return lock.successor.task_id if lock and lock.successor else None

    def waiter(self, claim: Claim) -> MemoryWaiter:
        """Queue for a place."""
        return MemoryWaiter(self, claim)

    def queue(self, claim: Claim) -> Grant | float:
        """Take the place, or a turn; then tell how long to sleep at most."""
        with self._changed:
            answer = self._take(claim)
            if isinstance(answer, Grant):
                return answer
            lock, now = self._locks[claim.key], self._now()
            turn = next((turn for turn in lock.queue if turn.claim.token == claim.token), None)
            if turn is None:
                turn, lock.limit = Turn(claim, 0.0), claim.limit
                lock.queue.append(turn)
            turn.deadline = answer + _GRACE
            lock.expiry = max(lock.expiry, turn.deadline)
            return answer - now

    def listen(self, seen: int, seconds: float) -> None:
        """Return once more than *seen* releases have happened, or after so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.releases > seen, seconds)

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:  # noqa: ARG002 (memory answers at once)
        """Start the ttl of each claim afresh."""
        with self._changed:
            return [self._renew(claim) for claim in claims]

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:  # noqa: ARG002
        """Look at each claim's place."""
        with self._changed:
            return [self._remaining(claim) for claim in claims]

    def release(self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND) -> Answer:  # noqa: ARG002
        """Give a place or a turn back, and wake all who wait."""
        with self._changed:
            lock, now = self._lock(claim.key), self._now()
            if lock is None or not lock.limit:
                return Answer.GONE
            number = lock.place_of(claim.token)
            waited = any(turn.claim.token == claim.token for turn in lock.queue)
            lock.queue = [turn for turn in lock.queue if turn.claim.token != claim.token]
            if number is not None:
                self._leave(lock, number, now)
            if lock.successor is not None and lock.successor.deadline <= now:
                lock.successor = None
            if not lock.places and not lock.queue and lock.successor is None and not lock.marks(now):
                del self._locks[claim.key]
            self.releases += 1
            self._changed.notify_all()
            return Answer.DONE if number is not None or waited else Answer.TAKEN

    def publish(self, key: str, task_id: str, seconds: float, *, counts_running: bool, quiet: float) -> Holder | None:
        """Mark it, or look who is in the way."""
        with self._changed:
            now = self._now()
            lock = self._locks.setdefault(key, self._lock(key) or Lock())
            held = sorted((p for p in lock.places.values() if p.deadline > now), key=lambda place: place.deadline)
            marks = [mark for mark in lock.marks(now) if mark.task_id != task_id]
            has_asked = lock.queued in lock.marks(now) and lock.queued not in marks
            counts_running = counts_running and not has_asked
            running = held if counts_running and lock.limit and len(held) >= lock.limit else []
            if marks or running:
                if lock.queued not in marks and held:
                    return self._holder(held[0])
                return self._turn(Turn(successors_claim(key, marks[0]), marks[0].deadline))
            lock.publish(task_id, now, seconds, quiet)
            return None

    def withdraw(self, key: str, task_id: str, *, afresh: bool = False) -> None:
        """Forget the successor, and what is queued."""
        with self._changed:
            lock = self._lock(key)
            if lock is not None:
                lock.withdraw(task_id, afresh=afresh)
                if not lock.limit and not lock.marks(0.0):
                    del self._locks[key]

    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Claim or note it."""
        with self._changed:
            slots = self._slots.setdefault(key, {})
            known = slots.get(slot.entry)
            if known is not None:
                done = not slot.sent and known.sent >= known.due >= slot.due
                if known.fence > slot.fence or done:
                    return False
                slot = replace(slot, sent=slot.sent or known.sent)
            slots[slot.entry] = slot
            return True

    def slots(self, key: str) -> dict[str, Slot]:
        """Those that are known."""
        return dict(self._slots.get(key, {}))

    def note(self, key: str, text: str, seconds: float) -> None:
        """Keep it until its time has come."""
        with self._changed:
            now = self._now()
            self._notes = {known: note for known, note in self._notes.items() if note[1] > now}
            self._notes[key] = text, now + seconds

    def noted(self, key: str) -> str | None:
        """Look it up."""
        text, expiry = self._notes.get(key, (None, 0.0))
        return text if expiry > self._now() else None

    def holders(self, key: str) -> list[Holder]:
        """Who holds *key* now."""
        with self._changed:
            lock, now = self._lock(key), self._now()
            places = lock.places.values() if lock else ()
            found = [self._holder(place) for place in places if place.deadline > now]
            return sorted(found, key=lambda holder: holder.expires_in)

    def clear(self) -> None:
        """Forget everything, as a restart without data does."""
        with self._changed:
            self._locks.clear()
            self.releases += 1
            self._changed.notify_all()

    def _lock(self, key: str) -> Lock | None:
        lock = self._locks.get(key)
        if lock is not None and lock.expiry <= self._now():
            del self._locks[key]
            return None
        return lock

    def _take(self, claim: Claim) -> Grant | float:
        """Grant the claim, or tell when somebody's deadline passes."""
        sent_at, now = clock(), self._now()
        lock = self._locks.setdefault(claim.key, self._lock(claim.key) or Lock())
        number = lock.place_of(claim.token)
        if number is not None:
            place = lock.places[number]
            self._extend(lock, place, claim.ttl, now)
            return Grant(number, place.fence, False, place.since, sent_at, place.arguments)
        free, ahead = lock.free_places(now, claim.limit), lock.turns_before(claim.token, now)
        following = lock.successor_before(claim, now)
        mine = claim.facts.get("task_id", "")
        if following is not None and following.task_id != mine:
            ahead.append(Turn(successors_claim(claim.key, following), following.deadline))
        queued = lock.queued if claim.queued else None
        if queued is not None and queued.deadline > now and queued.task_id != mine:
            ahead.append(Turn(successors_claim(claim.key, queued), queued.deadline))
        if lock.limit and lock.limit != claim.limit:
            if len(free) < lock.limit or ahead:
                raise ConfigurationError(
                    f"lock_limit={claim.limit} is not allowed for key={claim.key}: it is held under "
                    f"lock_limit={lock.limit}; give all who share the key the same limit"
                )
            lock.limit, lock.places, free = claim.limit, {}, [1]
        if len(ahead) >= len(free):
            deadlines = [place.deadline for place in lock.places.values() if place.deadline > now]
            deadlines += [turn.deadline for turn in ahead] if free else []
            return min([now + claim.ttl, *deadlines])
        return self._grant(lock, free[0], claim, now, sent_at)

    def _grant(self, lock: Lock, number: int, claim: Claim, now: float, sent_at: float) -> Grant:
        corpse = lock.places.get(number)
        lock.queue = [turn for turn in lock.queue if turn.claim.token != claim.token]
        # A clock of this process may stand still between two grants; that of a server does not.
        self._fence = max(self._fence + 1, int(now * 1_000_000))
        place = Place(claim, self._fence, now, 0.0)
        if lock.successor is not None and lock.successor.task_id == claim.facts.get("task_id", ""):
            place.arguments, lock.successor = lock.successor.arguments, None
        if lock.queued is not None and lock.queued.task_id == claim.facts.get("task_id", ""):
            lock.queued = None
        lock.places[number], lock.limit = place, claim.limit
        alone = len(lock.free_places(now)) == lock.limit and not lock.queue and lock.successor is None
        if alone and lock.queued is None and lock.quiet is None:
            lock.expiry = 0.0
        self._extend(lock, place, claim.ttl, now)
        took_over = corpse is not None and not corpse.on_hold
        return Grant(number, place.fence, took_over, place.since, sent_at, place.arguments)

    def _extend(self, lock: Lock, place: Place, ttl: float, now: float) -> None:
        place.deadline = now + ttl
        lock.expiry = max(lock.expiry, now + 2 * ttl)

    def _renew(self, claim: Claim) -> Answer:
        lock = self._lock(claim.key)
        number = lock.place_of(claim.token) if lock is not None else None
        if lock is None:
            return Answer.GONE
        if number is None:
            return Answer.TAKEN
        self._extend(lock, lock.places[number], claim.ttl, self._now())
        return Answer.REPLACED if lock.places[number].makes_way else Answer.DONE

    def _remaining(self, claim: Claim) -> float | None:
        lock = self._lock(claim.key)
        number = lock.place_of(claim.token) if lock is not None else None
        return lock.places[number].deadline - self._now() if lock is not None and number is not None else None

    def _leave(self, lock: Lock, number: int, now: float) -> None:
        place = lock.places.pop(number)
        free_at = place.since + place.claim.min_hold
        if free_at > now:
            nobody = replace(place.claim, token=f"~{place.claim.token}")
            lock.places[number] = replace(place, claim=nobody, deadline=free_at, on_hold=True)
            lock.expiry = max(lock.expiry, free_at)

    def _holder(self, place: Place) -> Holder:
        facts = place.claim.facts
        pid = facts.get("pid")
        return Holder(
            key=place.claim.key,
            token=place.claim.token,
            fence=place.fence,
            acquired_at=datetime.fromtimestamp(place.since, UTC),
            expires_in=place.deadline - self._now(),
            task_id=facts.get("task_id"),
            # As a store of text does it: the lock's name, where that is the task's.
            task_name=facts.get("task_name") or (lock_name_of(place.claim.key) if "task_id" in facts else None),
            hostname=facts.get("hostname"),
            pid=int(pid) if pid else None,
            attempt=int(facts.get("attempt", 0)),
        )

    def _turn(self, turn: Turn) -> Holder:
        now = self._now()
        since = datetime.fromtimestamp(now, UTC)
        return Holder(turn.claim.key, turn.claim.token, 0, since, turn.deadline - now, turn.claim.facts.get("task_id"))
