"""Renewing the leases of pool children whose heartbeat gets no time to run.

A body that holds the GIL in C starves the heartbeat of its process. Meanwhile the main process of its worker renews. It
decides nothing: only the heartbeat finds out that a lease is lost.
"""

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from pathlib import Path

from celery_singleton_lock.leases.heartbeat import Renewal
from celery_singleton_lock.stores.base import Store, clock

_ROUNDS_PER_TTL = 8
_LONGEST_SLEEP = 0.2
# Enough to connect to a store that is far away.
_BOUND = 2.0


class ChildLeaseRenewer:
    """Looks a few times per ttl for leases that nobody has renewed in time, in a thread for each store.

    Arguments:
        late: Returns the leases that may be late; called at each look.
    """

    def __init__(self, late: Callable[[], Iterable[Renewal]]) -> None:
        self._late = late
        self._pause = float("inf")
        self._threads: dict[Store, threading.Thread] = {}

    def start(self, store: Store, ttl: float) -> None:
        """Let a thread run for *store*, often enough for leases of *ttl* seconds."""
        self._pause = min(self._pause, ttl / _ROUNDS_PER_TTL)
        thread = self._threads.get(store)
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=self._run, args=(store,), name="singleton-lock-children", daemon=True)
            self._threads[store] = thread
            thread.start()

    def _run(self, store: Store) -> None:
        silent = set[Hashable]()
        while True:
            began = clock()
            # In slices, because a lease with a shorter ttl may come meanwhile.
            while (left := began + self._pause - clock()) > 0:
                time.sleep(min(left, _LONGEST_SLEEP))
            # The child reports any error.
            with suppress(Exception):
                self._renew_by_part(store, [each for each in self._late() if each.store is store], silent)

    def _renew_by_part(self, store: Store, renewals: list[Renewal], silent: set[Hashable]) -> None:
        parts: dict[Hashable, list[Renewal]] = {}
        for renewal in renewals:
            parts.setdefault(store.part_of(renewal.key), []).append(renewal)
        # The parts that were silent the last time come last.
        for part in sorted(parts, key=silent.__contains__):
            silent.add(part)
            with suppress(Exception):
                _renew(store, parts[part])
                silent.discard(part)


def _renew(store: Store, renewals: list[Renewal]) -> None:
    remaining = store.remaining([renewal.claim for renewal in renewals], _BOUND)
    # A lease whose heartbeat is well, or that was released meanwhile, is not touched.
    late = [
        renewal.claim
        for renewal, seconds in zip(renewals, remaining, strict=True)
        if seconds is not None and seconds < renewal.ttl / 2
    ]
    if late:
        store.renew(late, _BOUND)


# The state of a child, as the kernel knows it.

_DEAD = ("", "Z", "X")
_STOPPED = ("T", "t")


def is_dead(pid: int) -> bool:
    """It runs nothing any more."""
    return _state_of(pid) in _DEAD


def is_stopped(pid: int) -> bool:
    """It runs nothing until somebody lets it go on."""
    return _state_of(pid) in _STOPPED


def _state_of(pid: int) -> str:
    """The letter that the kernel has for its state; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "" if Path("/proc/self").exists() else _state_without_proc(pid)
    return stat.rpartition(")")[2].split()[0]


def _state_without_proc(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    return "R"
