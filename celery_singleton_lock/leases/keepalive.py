"""Renewing leases for a heartbeat that gets no time to run.

A heartbeat shares the interpreter, or the event loop, with the bodies it works
for. One that holds the GIL in C, or computes in a greenlet without a pause,
starves it. Meanwhile something else renews: the main process of a worker for
its pool children, a native thread beside the greenlets. It decides nothing: only the
heartbeat finds out, and tells, that a lease is lost.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from celery_singleton_lock.leases.greenlets import native_sleep, start_native_thread
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Answer

_ROUNDS_PER_TTL = 8
_LONGEST_SLEEP = 0.2
# Enough to connect to a store that is far away.
_BOUND = 2.0


class Keepalive:
    """Native threads that look a few times per ttl for leases that nobody has renewed in time.

    There is one for each store, because a store that does not answer holds up its
    thread. Each has connections of its own: those of greenlets, or of
    another thread's, cannot be used in it.

    Arguments:
        late: Returns the leases that may be late; called at each look.
    """

    def __init__(self, late: Callable[[], Iterable[Renewal]]) -> None:
        self._late = late
        self._pause = float("inf")
        self._pid: int | None = None
        self._stores: set[Store] = set()

    def start(self, store: Store, ttl: float) -> None:
        """Let a thread run for *store*, often enough for leases of *ttl* seconds."""
        self._pause = min(self._pause, ttl / _ROUNDS_PER_TTL)
        if self._pid != os.getpid():
            self._stores, self._pid = set(), os.getpid()
        if store not in self._stores:
            self._start_thread(store)
            # Only now: a signal may raise before. A second thread would do no harm.
            self._stores.add(store)

    def _start_thread(self, store: Store) -> None:
        life = self._live(store)
        next(life)
        start_native_thread(partial(next, life, None))

    def _live(self, store: Store) -> Iterator[None]:
        """A generator, so that the thread begins inside the `try`: a function may be broken off before that."""
        try:
            yield
            twin, silent = store.twin(), set[Hashable]()
            while True:
                self._sleep()
                # The heartbeat tells of any error. This thread would not come back if it died, and it cannot share
                # the locks of a log with greenlets.
                with suppress(Exception):
                    self._renew_by_part(twin, [each for each in self._late() if each.store is store], silent)
        except Exception:
            # Raised from outside: another one goes on.
            self._start_thread(store)
            raise

    def _sleep(self) -> None:
        """In slices, because a lease with a shorter ttl may come meanwhile."""
        began = clock()
        while (remaining := began + self._pause - clock()) > 0:
            native_sleep(min(remaining, _LONGEST_SLEEP))

    def _renew_by_part(self, store: Store, renewals: list[Renewal], silent: set[Hashable]) -> None:
        parts: dict[Hashable, list[Renewal]] = {}
        for renewal in renewals:
            parts.setdefault(store.part_of(renewal.key), []).append(renewal)
        # The parts that were silent the last time come last.
        for part in sorted(parts, key=silent.__contains__):
            silent.add(part)
            with suppress(Exception):
                self._renew(store, parts[part])
                silent.discard(part)

    def _renew(self, store: Store, renewals: list[Renewal]) -> None:
        remaining = store.remaining([renewal.claim for renewal in renewals], _BOUND)
        # A lease whose heartbeat is well, or that was released meanwhile, is not touched.
        late = [
            renewal
            for renewal, seconds in zip(renewals, remaining, strict=True)
            if seconds is not None and seconds < renewal.ttl / 2
        ]
        if not late:
            return
        sent_at = clock()
        answers = store.renew([renewal.claim for renewal in late], _BOUND)
        for renewal, answer in zip(late, answers, strict=True):
            if answer in (Answer.DONE, Answer.REPLACED, Answer.BROKEN):
                renewal.renewed(sent_at)
