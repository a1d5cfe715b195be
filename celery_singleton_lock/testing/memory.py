"""A store in memory in place of an app's own, with a clock that a test can move."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.leases.heartbeat import heartbeat
from celery_singleton_lock.stores import in_memory
from celery_singleton_lock.stores.memory.described import described
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Holder
from celery_singleton_lock.testing.locks import followed_by_locks, know_store_of, return_locks

_SETTING = "singleton_lock_url"
_numbers = count(1)


class StoreInMemory(MemoryStore):
    """Locks of the process that has made it, and of no other.

    Its clock is nobody's wall clock: it goes on while time-machine or freezegun hold the time, and only `advance`
    moves it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        super().__init__()

    @property
    def _guard(self) -> Any:
        """The guard of all that is here; asked for by whoever wants something, so a copy of this store answers none."""
        if self._pid != os.getpid():
            raise ConfigurationError(
                f"memory_store() was entered in process {self._pid}, and process {os.getpid()} has a copy of it, so a "
                "lock there would keep nobody out; run the worker with the pool 'solo' or 'threads' "
                "(celery_worker_pool), or test prefork with a server"
            )
        return self._lock_of_all

    @_guard.setter
    def _guard(self, guard: Any) -> None:
        self._lock_of_all = guard

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once for what is in the store.

        Cool-downs and marks end. What a living process would have renewed meanwhile does not: leases of bodies, of
        `hold` and of `Lock`, and turns of those that wait. Nor do the timers of the process run faster, so a
        `countdown` takes as long as ever.

        Raises:
            ConfigurationError: It is no number of seconds, or would turn time back.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
            raise ConfigurationError(f"advance({seconds!r}) is not possible: give a number of seconds, at least 0")
        with self._guard:
            self._clock.advance(seconds)
            now = self._now()
            for claim in [one.claim for one in heartbeat.watched() if one.store is self]:
                lock = self._locks.get(claim.key)
                number = lock.place_of(claim.token) if lock is not None else None
                if lock is not None and number is not None:
                    lock.renew(lock.places[number], claim.ttl, now)
            for lock in self._locks.values():
                for turn in lock.queue:
                    turn.deadline += seconds
                    lock.stay_until(turn.deadline)
            self._wake()

    def held(self) -> list[Holder]:
        """Who holds a lock now, whichever it is; a cool-down is nobody's."""
        with self._guard:
            now = self._now()
            return [holder for lock in self._locks.values() for holder in described(lock.holders(now), now)]


@contextmanager
def memory_store(app: "Celery[Any]") -> Iterator[StoreInMemory]:
    """Have the app use a new store in memory inside, instead of its own.

    It serves all threads of this process, so a worker of Celery's `celery_worker` as well. Another process has none of
    it: one that is forked inside is told so, and one that was started by itself uses the app's own store.

    Raises:
        ConfigurationError: It is given something else than an app.
    """
    if not isinstance(app, Celery):
        raise ConfigurationError(f"memory_store({app!r}) is not possible: give the Celery app whose tasks are tested")
    know_store_of(app)
    url, changes = f"memory://test-{next(_numbers)}", app.conf.changes
    before = {_SETTING: changes[_SETTING]} if _SETTING in changes else {}
    store = in_memory[url] = StoreInMemory()
    changes[_SETTING] = url
    try:
        with followed_by_locks(app, store):
            yield store
    finally:
        changes.pop(_SETTING, None)
        changes.update(before)
        in_memory.pop(url, None)
        return_locks(app, store)
