"""Leases whose release was not answered, released in the background until it is."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from celery_singleton_lock.stores.base import clock

logger = logging.getLogger("celery_singleton_lock")

_PAUSE = 0.5


class Leftover(Protocol):
    """Something to give back."""

    @property
    def key(self) -> str:
        """The lock key."""

    @property
    def ttl(self) -> float:
        """Seconds after which the store has freed it by itself."""

    def release_again(self) -> bool:
        """Try; True once answered."""


def _at_once() -> bool:
    return True


class Leftovers:
    """A thread that lives as long as there is something left to release.

    It is not the heartbeat's, which must not wait for a store that is away.
    """

    def __init__(self) -> None:
        self._start_afresh()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_afresh)

    def _start_afresh(self) -> None:
        self._leases: deque[tuple[Leftover, float, Callable[[], bool]]] = deque()
        self._guard = threading.Lock()
        self._running = False

    def add(self, lease: Leftover, may_release: Callable[[], bool] = _at_once) -> None:
        """Release *lease* until that is answered, for one ttl: by then the store has freed it by itself.

        Arguments:
            lease: One that nobody holds any more, or that nobody will once *may_release* is true.
            may_release: Asked before each try.
        """
        with self._guard:
            self._leases.append((lease, clock() + lease.ttl, may_release))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="singleton-lock-leftovers", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._leases:
                    self._running = False
                    return
                lease, give_up_at, may_release = self._leases.popleft()
            if clock() < give_up_at and not self._release(lease, may_release):
                with self._guard:
                    self._leases.append((lease, give_up_at, may_release))
                time.sleep(_PAUSE)

    def _release(self, lease: Leftover, may_release: Callable[[], bool]) -> bool:
        try:
            return may_release() and lease.release_again()
        except Exception:
            logger.exception("lock.unreleased key=%s: the release is broken", lease.key)
            return False


leftovers = Leftovers()
