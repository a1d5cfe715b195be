"""No locking, for tests that are about something else."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.lock import Lock
from celery_singleton_lock.options import MAX_LIMIT
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.task import SingletonTask


class _Off:
    """Stands for `SingletonTask.is_lockable`: always False for a task. A class answers as ever, for its definition."""

    def __init__(self, on: Any) -> None:
        self._on = on

    def __get__(self, task: Any, cls: Any) -> Callable[[], bool]:
        on: Callable[[], bool] = self._on.__get__(task, cls)
        return on if task is None else _no


class _Switch:
    """Off while at least one block is open, in any thread."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._blocks = 0
        self._was: tuple[Any, Any] = None, None

    @property
    def is_off(self) -> bool:
        return self._blocks > 0

    def turn_off(self) -> None:
        with self._guard:
            self._blocks += 1
            if self._blocks == 1:
                self._was = vars(SingletonTask)["is_lockable"], vars(Lock)["_new_lease"]
                lockable, new_lease = self._was
                type.__setattr__(SingletonTask, "is_lockable", _Off(lockable))
                type.__setattr__(Lock, "_new_lease", _granted_always(new_lease))

    def turn_on_again(self) -> None:
        with self._guard:
            self._blocks -= 1
            if self._blocks == 0:
                lockable, new_lease = self._was
                type.__setattr__(SingletonTask, "is_lockable", lockable)
                type.__setattr__(Lock, "_new_lease", new_lease)


switch = _Switch()


@contextmanager
def disabled() -> Iterator[None]:
    """Lock nothing inside, in any thread of this process: bodies run, calls are published, `Lock` grants at once.

    The `self.lock` of a body is that of a run without a lock: not held, and its fence is 0. No store is used. A
    process that is forked inside locks nothing for as long as it lives; one that was started on its own locks as ever.
    """
    switch.turn_off()
    try:
        yield
    finally:
        switch.turn_on_again()


def _no() -> bool:
    return False


def _granted_always(new_lease: Callable[[Lock], Lease]) -> Callable[[Lock], Lease]:
    """Leases of a store that nobody else has, with more places than a test can have threads."""
    store = MemoryStore()

    def granted(lock: Lock) -> Lease:
        return Lease(store, replace(new_lease(lock).claim, limit=MAX_LIMIT))

    return granted
