"""Claims whose release was not answered, released in the background until it is."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.leases.one_thread import OneThread
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Claim, Ending

logger = logging.getLogger("celery_singleton_lock")

_PAUSE = 0.5
# Enough to connect to a store that is far away.
_BOUND = 2.0


class Leftover(Protocol):
    """Something to give back."""

    @property
    def key(self) -> str:
        """The lock key."""

    @property
    def task_id(self) -> str | None:
        """Of the run that has left it, for the log; None if it is no task's."""

    @property
    def ttl(self) -> float:
        """Seconds after which the store has freed it by itself."""

    def release_again(self) -> bool:
        """Try; True once answered."""


class Unreleased:
    """A claim that nobody wants any more, and of which the store may not know that yet.

    Arguments:
        store: The store.
        claim: What was asked for.
        place: Which of the lock's places it has; None if that is not known.
        ending: What later deliveries of the message have to know.
    """

    def __init__(self, store: Store, claim: Claim, place: int | None = None, ending: Ending | None = None) -> None:
        self._store = store
        self._claim = claim
        self._place = place
        self._ending = ending

    @property
    def key(self) -> str:
        """The lock key."""
        return self._claim.key

    @property
    def task_id(self) -> str | None:
        """Of the run that has left it; None if it is no task's."""
        return self._claim.facts.task_id or None

    @property
    def ttl(self) -> float:
        """Seconds after which the store has freed it by itself."""
        return self._claim.ttl

    def release_again(self) -> bool:
        """Try once more to give back what a first release may not have; True once answered."""
        try:
            self._store.release(self._claim, self._place, bound=_BOUND, ending=self._ending)
        except StoreError:
            return False
        return True


def _at_once() -> bool:
    return True


class Leftovers:
    """A thread that lives as long as there is something left to release.

    It is not the heartbeat's, which must not wait for a store that is away.
    """

    def __init__(self) -> None:
        self._start_over()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        self._left: deque[tuple[Leftover, float, Callable[[], bool]]] = deque()
        self._lock = threading.RLock()
        self._thread = OneThread("leftovers", self._run, self._lock)

    def add(self, leftover: Leftover, may_release: Callable[[], bool] = _at_once) -> None:
        """Release *leftover* until that is answered, for one ttl: by then the store has freed it by itself.

        Arguments:
            leftover: What nobody holds any more, or will hold once *may_release* is true.
            may_release: Asked before each try.
        """
        with self._lock:
            self._left.append((leftover, clock() + leftover.ttl, may_release))
            self._thread.ensure()

    def _run(self) -> None:
        while (one := self._next()) is not None:
            leftover, give_up_at, may_release = one
            if clock() < give_up_at and not self._release(leftover, may_release):
                with self._lock:
                    self._left.append(one)
                time.sleep(_PAUSE)

    def _next(self) -> tuple[Leftover, float, Callable[[], bool]] | None:
        with self._lock:
            return self._left.popleft() if self._thread.goes_on(bool(self._left)) else None

    def _release(self, leftover: Leftover, may_release: Callable[[], bool]) -> bool:
        try:
            return may_release() and leftover.release_again()
        except Exception:
            event = "lock.unreleased key=%s task_id=%s: the release is broken"
            logger.exception(event, leftover.key, leftover.task_id)
            return False


leftovers = Leftovers()
