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
from typing import TYPE_CHECKING

from celery_singleton_lock.backends.base import Answer, Backend, clock
from celery_singleton_lock.core.greenlets import native_sleep, start_native_thread
from celery_singleton_lock.errors import BackendError

if TYPE_CHECKING:
    from celery_singleton_lock.core.lease import Lease

_ROUNDS_PER_TTL = 8
_LONGEST_RENEWAL = 1.0


class Keepalive:
    """A native thread that looks a few times per ttl for leases that nobody has renewed in time.

    Arguments:
        late: Tells which leases those are, whenever it is asked.
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
            by_backend: dict[Backend, list[Lease]] = defaultdict(list)
            for lease in self._late():
                by_backend[lease.backend].append(lease)
            for backend, leases in by_backend.items():
                self._renew(backend, leases)

    def _renew(self, backend: Backend, leases: "list[Lease]") -> None:
        own = self._backends.setdefault(backend, backend.twin())
        sent_at = clock()
        try:
            answers = own.renew([lease.claim for lease in leases], _LONGEST_RENEWAL)
        except BackendError:
            return
        for lease, answer in zip(leases, answers, strict=True):
            if answer is Answer.DONE:
                lease.renewed(sent_at)
