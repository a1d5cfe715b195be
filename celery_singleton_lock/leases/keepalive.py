"""Renewing leases for a heartbeat that gets no time to run.

A heartbeat shares the interpreter, or the event loop, with the bodies it works
for. One that holds the GIL in C, or computes in a greenlet without a pause,
starves it. Whoever is not starved, the main process of a worker for its pool
children or a native thread beside the greenlets, renews meanwhile. It decides
nothing: that a lease is lost is for the heartbeat to find out and to tell.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.leases.greenlets import native_sleep, start_native_thread
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Answer

if TYPE_CHECKING:
    from celery_singleton_lock.leases.lease import Lease

_ROUNDS_PER_TTL = 8
_BOUND = 1.0


class Keepalive:
    """A native thread that looks a few times per ttl for leases that nobody has renewed in time.

    Arguments:
        late: Tells which leases those may be, whenever it is asked.
    """

    def __init__(self, late: "Callable[[], Iterable[Lease]]") -> None:
        self._late = late
        self._pause = float("inf")
        self._pid: int | None = None
        # Of its own, because a connection of greenlets cannot be used in another thread.
        self._stores: dict[Store, Store] = {}

    def start(self, ttl: float) -> None:
        """Let the thread run, often enough for leases of *ttl* seconds."""
        self._pause = min(self._pause, ttl / _ROUNDS_PER_TTL)
        if self._pid != os.getpid():
            self._pid, self._stores = os.getpid(), {}
            start_native_thread(self._run)

    def _run(self) -> None:
        while True:
            native_sleep(self._pause)
            # Whatever it is, the heartbeat tells of it; a thread that had died would not come back,
            # and this one cannot share the locks of a log with greenlets.
            with suppress(Exception):
                self._renew_those_in_need()

    def _renew_those_in_need(self) -> None:
        by_store: dict[Store, list[Lease]] = defaultdict(list)
        for lease in self._late():
            by_store[lease.store].append(lease)
        for store, leases in by_store.items():
            with suppress(StoreError):
                self._renew(self._twin_of(store), leases)

    def _renew(self, store: Store, leases: "list[Lease]") -> None:
        remaining = store.remaining([lease.claim for lease in leases], _BOUND)
        # A lease whose heartbeat is well, or that was released meanwhile, is not touched.
        late = [
            lease
            for lease, seconds in zip(leases, remaining, strict=True)
            if seconds is not None and seconds < lease.ttl / 2
        ]
        if not late:
            return
        sent_at = clock()
        answers = store.renew([lease.claim for lease in late], _BOUND)
        for lease, answer in zip(late, answers, strict=True):
            if answer in (Answer.DONE, Answer.REPLACED):
                lease.renewed(sent_at)

    def _twin_of(self, store: Store) -> Store:
        if store not in self._stores:
            self._stores[store] = store.twin()
        return self._stores[store]
