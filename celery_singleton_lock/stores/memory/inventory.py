"""Seeing and breaking the locks of others, in memory; survey.lua and break.lua do the same for Redis."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

from celery_singleton_lock.stores.inventory import Asked, Echo, Inventory, LeftMark, MarkState, Survey
from celery_singleton_lock.stores.memory.described import described
from celery_singleton_lock.stores.memory.lock import Lock, Mark, in_force
from celery_singleton_lock.stores.records import Claim


class MemoryInventory(Inventory):
    """The part of a store in memory that serves its operator."""

    _guard: threading.RLock
    _now: Callable[[], float]
    _locks: dict[str, Lock]
    _counts: dict[str, dict[str, int]]
    _batches: dict[tuple[str, str], int]

    def echo(self, bound: float) -> Echo:  # noqa: ARG002 (memory answers at once)
        """It is this process."""
        return Echo(0.0, 0.0)

    def about_servers(self, bound: float) -> Mapping[str, Mapping[str, str]]:  # noqa: ARG002
        """There is none."""
        return {}

    def without_expiry(self, start: str) -> Iterator[str]:  # noqa: ARG002
        """None: every lock in memory ends by itself."""
        return iter(())

    def keys(self, start: str) -> Iterator[str]:
        """The keys that are known now."""
        with self._guard:
            known = [key for key in list(self._locks) if key.startswith(start) and self._lock(key) is not None]
        yield from known

    def survey(self, keys: Sequence[str], task_id: str = "") -> list[Survey]:
        """Look at each."""
        with self._guard:
            return [self._survey(key, task_id) for key in keys]

    def break_lock(self, key: str, token: str | None, by: str, *, force: bool) -> Asked:
        """Ask the holders to end or free their places, and wake all waiters."""
        with self._guard:
            lock, now = self._lock(key), self._now()
            if lock is None:
                return Asked((), ())
            chosen = [place for place in lock.holders(now) if token in (None, place.claim.token)]
            asked = tuple(described(chosen, now))
            for place in chosen:
                place.makes_way, place.broken_by = True, by
                if force:
                    lock.empty(place)
            dropped = _drop_what_holds_nothing(lock, now) if token is None else ()
            self._delete_if_idle(key)
            self._wake()
            return Asked(asked, dropped)

    def count(self, key: str, process: str, number: int, sums: Mapping[str, int], timeout: float) -> None:  # noqa: ARG002
        """Add them."""
        with self._guard:
            if self._batches.get((key, process)) == number:
                return
            self._batches[key, process] = number
            known = self._counts.setdefault(key, {})
            for field, amount in sums.items():
                known[field] = known.get(field, 0) + amount

    def counted(self, key: str) -> dict[str, int]:
        """The numbers that are known."""
        with self._guard:
            return dict(self._counts.get(key, {}))

    def broken_by(self, claim: Claim) -> str | None:
        """Look at the place of the claim."""
        with self._guard:
            lock = self._lock(claim.key)
            number = lock.place_of(claim.token) if lock is not None else None
            return lock.places[number].broken_by or None if lock is not None and number is not None else None

    def _survey(self, key: str, task_id: str) -> Survey:
        lock, now = self._lock(key), self._now()
        if lock is None:
            return Survey(key, round(now * 1_000_000), None, (), (), 0)
        fence = max((place.fence for place in lock.places.values()), default=None)
        waiters = sum(turn.deadline > now for turn in lock.queue)
        holders = tuple(described(lock.alive(now), now))
        turn = lock.turns.get(task_id)
        left = turn.deadline - now if turn is not None and turn.deadline > now else None
        return Survey(key, round(now * 1_000_000), fence, holders, tuple(_marks_of(lock, now)), waiters, left)

    @abstractmethod
    def _lock(self, key: str) -> Lock | None: ...

    @abstractmethod
    def _delete_if_idle(self, key: str) -> None: ...

    @abstractmethod
    def _wake(self) -> None: ...


def _known_marks(lock: Lock, now: float) -> Iterator[tuple[MarkState, Mark, str | None]]:
    successor = in_force(lock.successor, now)
    known: list[tuple[MarkState, Mark | None, str | None]] = [
        ("queued", lock.queued, None),
        ("queued", lock.joined, None),
        ("next", successor, successor.task_name if successor else None),
        ("quiet", lock.quiet, None),
    ]
    for state, mark, task_name in known:
        if (one := in_force(mark, now)) is not None:
            yield state, one, task_name


def _marks_of(lock: Lock, now: float) -> Iterator[LeftMark]:
    for state, mark, task_name in _known_marks(lock, now):
        yield LeftMark(state, mark.task_id, mark.deadline - now, task_name, mark.label or None)


def _drop_what_holds_nothing(lock: Lock, now: float) -> tuple[MarkState, ...]:
    dropped = dict.fromkeys(state for state, *_ in _known_marks(lock, now))
    for place in lock.alive(now):
        if place.on_hold:
            dropped["quiet"] = None
            lock.empty(place)
    lock.queued = lock.joined = lock.quiet = lock.successor = None
    return tuple(dropped)
