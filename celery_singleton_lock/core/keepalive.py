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

from celery_singleton_lock.backends.base import Backend, clock
from celery_singleton_lock.backends.records import Answer
from celery_singleton_lock.core.greenlets import native_sleep, start_native_thread
from celery_singleton_lock.errors import BackendError

if TYPE_CHECKING:
    from celery_singleton_lock.core.lease import Lease

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
        self._backends: dict[Backend, Backend] = {}

    def start(self, ttl: float) -> None:
        """Let the thread run, often enough for leases of *ttl* seconds."""
        self._pause = min(self._pause, ttl / _ROUNDS_PER_TTL)
        if self._pid != os.getpid():
            self._pid, self._backends = os.getpid(), {}
            start_native_thread(self._run)

    def _run(self) -> None:
        while True:
            native_sleep(self._pause)
            # Whatever it is, the heartbeat tells of it; a thread that had died would not come back,
            # and this one cannot share the locks of a log with greenlets.
            with suppress(Exception):
                self._renew_those_in_need()

    def _renew_those_in_need(self) -> None:
        by_backend: dict[Backend, list[Lease]] = defaultdict(list)
        for lease in self._late():
            by_backend[lease.backend].append(lease)
        for backend, leases in by_backend.items():
            with suppress(BackendError):
                self._renew(self._twin_of(backend), leases)

    def _renew(self, backend: Backend, leases: "list[Lease]") -> None:
        remaining = backend.remaining([lease.claim for lease in leases], _BOUND)
        # A lease whose heartbeat is well, or that was released meanwhile, is not touched.
        late = [
            lease
            for lease, seconds in zip(leases, remaining, strict=True)
            if seconds is not None and seconds < lease.ttl / 2
        ]
        if not late:
            return
        sent_at = clock()
        answers = backend.renew([lease.claim for lease in late], _BOUND)
        for lease, answer in zip(late, answers, strict=True):
            if answer in (Answer.DONE, Answer.REPLACED):
                lease.renewed(sent_at)

    def _twin_of(self, backend: Backend) -> Backend:
        if backend not in self._backends:
            self._backends[backend] = backend.twin()
        return self._backends[backend]
