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

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.store import Store

_ROUNDS_PER_TTL = 8
_LONGEST_SLEEP = 0.2
# Enough to connect to a store that is far away.
_BOUND = 2.0


class ChildLeaseRenewer:
    """Looks a few times per ttl, in one thread, for leases that nobody has renewed in time.

    Arguments:
        late: Returns the claims that may be late, each with its store; called at each look.
    """

    def __init__(self, late: Callable[[], Iterable[tuple[Store, Claim]]]) -> None:
        self._late = late
        self._pause = float("inf")
        self._thread: threading.Thread | None = None

    def start(self, ttl: float) -> None:
        """Let the thread run, often enough for leases of *ttl* seconds."""
        self._pause = min(self._pause, ttl / _ROUNDS_PER_TTL)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="singleton-lock-children", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            began = clock()
            # In slices, because a lease with a shorter ttl may come meanwhile.
            while (left := began + self._pause - clock()) > 0:
                time.sleep(min(left, _LONGEST_SLEEP))
            # By the part that answers, or is silent, by itself.
            claims: dict[tuple[Store, Hashable], list[Claim]] = {}
            for store, claim in self._late():
                claims.setdefault((store, store.part_of(claim.key)), []).append(claim)
            for (store, _), held in claims.items():
                # The child reports any error.
                with suppress(Exception):
                    _renew(store, held)


def _renew(store: Store, claims: list[Claim]) -> None:
    surveys = store.survey([claim.key for claim in claims])
    # A lease whose heartbeat is well, or that was released meanwhile, is not touched.
    late = [
        claim
        for claim, survey in zip(claims, surveys, strict=True)
        if any(each.token == claim.token and each.expires_in < claim.ttl / 2 for each in survey.holders)
    ]
    if late:
        store.renew(late, _BOUND)


# The state of a child, as the kernel knows it.

_DEAD = ("", "Z", "X")
_STOPPED = ("T", "t")


def is_dead(pid: int) -> bool:
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
