"""The counts of a process, until the thread of its heartbeat hands them over to the store.

To count is to append to a deque, which no thread and no signal can catch half-way. Nothing is sent on
the way of a task: sums go to the store from time to time, and at the end of the process.
"""

import secrets
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.counts import BOUNDS, OTHERS, field_of, hash_of

EVERY = 5.0
"""Seconds between two times that something is handed over, at least."""

_MOST_UNSORTED = 10_000
_MOST_AT_ONCE = 100
_MOST_TASKS = 500
_LONGEST_NAME = 200
_NEVER = float("inf")

What = Literal["acquired", "conflicts", "lost", "taken_over", "unanswered", "late", "held"]
"""The events that are counted; the value of `acquired` is the length of the wait, of `held` that of the lease."""


@dataclass(frozen=True)
class Batch:
    """Sums on their way to the store, which adds them once, however often they are sent.

    Attributes:
        store: The store.
        key: The hash of counts.
        number: Of this process, growing.
        sums: By field.
    """

    store: Store
    key: str
    number: int
    sums: dict[str, int]


class Tally:
    """Sums of what has happened in this process.

    Arguments:
        attend: Called with a store if there was nothing to hand over to it before. It calls `begin`, and sees to it
            that `flush` is called once `due_at` has come.
    """

    def __init__(self, attend: Callable[[Store], None]) -> None:
        self._attend = attend
        self._process = secrets.token_urlsafe(8)
        self._number = 0
        self._events: deque[tuple[Store, str, What, str, str, float]] = deque()
        self._due: dict[Store, float] = {}
        self._tasks: set[str] = set()
        self._sums: dict[tuple[Store, str], dict[str, int]] = {}
        self._batches: deque[Batch] = deque()
        # Guards the data here; the other lock is held while the store is asked.
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def add(self, store: Store, key: str, what: What, task: str, label: str = "", value: float = 0.0) -> None:
        """Count something.

        Arguments:
            store: Where the lock is.
            key: The lock key.
            what: What has happened.
            task: Name of the task; empty for a `Lock`.
            label: The outcome, or the reason.
            value: Seconds.
        """
        self._events.append((store, key, what, task, label, value))
        if store not in self._due:
            self._attend(store)
        elif len(self._events) > _MOST_UNSORTED:
            self._sort()

    def begin(self, store: Store) -> None:
        """Note that there is something for that store."""
        self._due[store] = clock() + EVERY

    def due_at(self, store: Store) -> float:
        """When `flush` is to be called; infinite if there is nothing."""
        return self._due.get(store, _NEVER)

    def put_off(self, store: Store, until: float) -> None:
        """Let `flush` be called no earlier than *until*."""
        self._due[store] = until

    def flush(self, store: Store, timeout: float) -> None:
        """Hand over what there is for that store, within *timeout* seconds.

        Raises:
            StoreError: No answer. It is kept for the next time, or for the end of the process.
        """
        give_up_at = clock() + timeout
        with self._flushing:
            # First: whatever is counted from here on is due again.
            self._due.pop(store, None)
            for batch in self._batches_for(store):
                left = max(0.0, give_up_at - clock())
                store.count(batch.key, self._process, batch.number, batch.sums, left)
                self._batches.remove(batch)

    def flush_all(self, timeout: float = 1.0) -> None:
        """Hand over all at the end of the process, within so many seconds for each store; the rest is lost."""
        self._sort()
        # Copies, because the heartbeat's thread may change them.
        stores = {*(store for store, _ in list(self._sums)), *(batch.store for batch in list(self._batches))}
        for store in stores:
            with suppress(SingletonLockError, OSError):
                self.flush(store, timeout)

    def _batches_for(self, store: Store) -> Iterator[Batch]:
        """First the batches that were sent in vain, unchanged, and then new ones."""
        while True:
            left = [batch for batch in self._batches if batch.store is store]
            if not left:
                self._sort()
                left = self._make_batches(store)
            if not left:
                return
            yield from left

    def _make_batches(self, store: Store) -> list[Batch]:
        made = []
        with self._lock:
            for of, key in list(self._sums):
                if of is not store:
                    continue
                fields = list(self._sums.pop((of, key)).items())
                for start in range(0, len(fields), _MOST_AT_ONCE):
                    self._number += 1
                    made.append(Batch(store, key, self._number, dict(fields[start : start + _MOST_AT_ONCE])))
            self._batches.extend(made)
        return made

    def _sort(self) -> None:
        with self._lock:
            # Most events are alike, so the slow part is done once for each kind.
            kinds: dict[tuple[Store, str, What, str, str, int], tuple[int, float]] = {}
            for _ in range(len(self._events)):
                store, key, what, task, label, value = self._events.popleft()
                kind = store, key.partition("{")[0], what, task, label, bisect_left(BOUNDS, value)
                times, seconds = kinds.get(kind, (0, 0.0))
                kinds[kind] = times + 1, seconds + value
            for (store, start, what, task, label, place), (times, seconds) in kinds.items():
                sums = self._sums.setdefault((store, hash_of(start)), {})
                for field, amount in _parts_of(what, self._known(task), label, place, times, seconds):
                    sums[field] = sums.get(field, 0) + amount

    def _known(self, task: str) -> str:
        """Its name, unless there are too many."""
        if task not in self._tasks:
            if len(self._tasks) >= _MOST_TASKS:
                return OTHERS
            self._tasks.add(task)
        # Half of a character cannot be sent.
        return task[:_LONGEST_NAME].encode(errors="replace").decode()


def _parts_of(what: What, task: str, label: str, place: int, times: int, seconds: float) -> Iterator[tuple[str, int]]:
    """The fields that grow, and by how much."""
    if what != "held":
        yield field_of(what, label, task), times
    if what in ("acquired", "held"):
        name = "waited" if what == "acquired" else "held"
        yield field_of(name, f"{BOUNDS[place]:g}" if place < len(BOUNDS) else "+Inf", task), times
        if (microseconds := round(seconds * 1_000_000)) > 0:
            yield field_of(name, "sum", task), microseconds
