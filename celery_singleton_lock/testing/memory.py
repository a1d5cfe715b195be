"""A store in memory that replaces the store of an app, with a clock that a test can move."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from celery import Celery
from celery.utils.text import match_case

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
    """Locks of the process that made the store, and of no other.

    Its clock is not the wall clock: it runs on while time-machine or freezegun hold the time, and only `advance`
    moves it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        super().__init__()

    @property
    def _guard(self) -> Any:
        """The guard of this store. Every request takes it, so a copy in a forked process refuses every request."""
        if self._pid != os.getpid():
            raise ConfigurationError(
                f"memory_store() was entered in process {self._pid}, and process {os.getpid()} has a copy of it, so a "
                "lock there would exclude nobody; run the worker with the pool 'solo' or 'threads' "
                "(celery_worker_pool), or test prefork with a server"
            )
        return self._lock_of_all

    @_guard.setter
    def _guard(self, guard: Any) -> None:
        self._lock_of_all = guard

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once for everything in the store.

        Cool-downs and marks end. Leases of bodies, of `hold` and of `Lock`, and turns of waiters do not, because a
        living process would have renewed them. The timers of the process do not run faster, so a `countdown` takes
        as long as ever.

        Raises:
            ConfigurationError: It is not a number of seconds, or it is negative.
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
        """The present holders of all locks; a cool-down has none."""
        with self._guard:
            now = self._now()
            return [holder for lock in self._locks.values() for holder in described(lock.holders(now), now)]


@contextmanager
def memory_store(app: "Celery[Any]") -> Iterator[StoreInMemory]:
    """Have the app use a new store in memory inside, instead of its own.

    All threads of this process use it, so a worker of Celery's `celery_worker` does too. Other processes do not: in
    one that is forked inside each lock raises an error, and one that was started on its own uses the app's own store.

    Raises:
        ConfigurationError: *app* is not a Celery app.
    """
    if not isinstance(app, Celery):
        raise ConfigurationError(f"memory_store({app!r}) is not possible: give the Celery app whose tasks are tested")
    know_store_of(app)
    url, changes = f"memory://test-{next(_numbers)}", app.conf.changes
    names = _names_of_the_setting(app)
    before = {name: changes[name] for name in names if name in changes}
    store = in_memory[url] = StoreInMemory()
    changes.update(dict.fromkeys(names, url))
    try:
        with followed_by_locks(app, store):
            yield store
    finally:
        for name in names:
            changes.pop(name, None)
        changes.update(before)
        in_memory.pop(url, None)
        return_locks(app, store)


def _names_of_the_setting(app: "Celery[Any]") -> list[str]:
    # In an app with a namespace, Celery before 5.7 looks everywhere for the name with the prefix before the other one.
    prefix = app.conf.prefix
    return [_SETTING, match_case(f"{prefix}{_SETTING}", prefix)] if prefix else [_SETTING]
