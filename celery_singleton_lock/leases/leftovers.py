"""Claims whose release was not answered, released in the background until it is."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.leases.one_thread import OneThread
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Claim, Ending

logger = logging.getLogger("celery_singleton_lock")

_PAUSE = 0.5
# Seconds for which a silent store, or a silent server of a cluster, is not asked, so that the leftovers of the others
# do not wait for it. No longer, because a key is to be free soon after its store is back.
_SILENCE = 1.0
# Seconds until the next leftover, after one that was put aside for that reason.
_STEP = 0.01
# Enough to connect to a store that is far away.
_BOUND = 2.0
# Seconds after which a request that was under way has surely come, even if a proxy has kept it back.
_UNDER_WAY = 3.0


class Leftover(Protocol):
    """Something to give back."""

    @property
    def key(self) -> str:
        """The lock key."""

    @property
    def task_id(self) -> str | None:
        """The task id of the run that has left it, for the log; None if it is no task's."""

    @property
    def ttl(self) -> float:
        """Seconds after which the store has freed it by itself."""

    @property
    def store(self) -> Store:
        """The store that has it."""

    def release_again(self) -> bool:
        """Try; True once answered."""


class Unreleased:
    """A claim that nobody wants any more, while the store may still count it.

    Arguments:
        store: The store.
        claim: What was asked for.
        place: Which of the lock's places it has; None if that is not known.
        ending: What later deliveries of the message have to know.
    """

    def __init__(self, store: Store, claim: Claim, place: int | None = None, ending: Ending | None = None) -> None:
        self.store = store
        self._claim = claim
        self._place = place
        self._ending = ending

    @property
    def key(self) -> str:
        """The lock key."""
        return self._claim.key

    @property
    def task_id(self) -> str | None:
        """The task id of the run that has left it; None if it is no task's."""
        return self._claim.facts.task_id or None

    @property
    def ttl(self) -> float:
        """Seconds after which the store has freed it by itself."""
        return self._claim.ttl

    def release_again(self) -> bool:
        """Try once more to release the claim, because the first release may have failed; True once answered."""
        try:
            self.store.release(self._claim, self._place, bound=_BOUND, ending=self._ending)
        except StoreError:
            return False
        # A later release is for a request that came late, and that run has no more to tell.
        self._ending = None
        return True


def _at_once() -> bool:
    return True


class _Left(NamedTuple):
    leftover: Leftover
    give_up_at: float
    may_release: Callable[[], bool] = _at_once
    may_arrive: bool = False
    not_before: float = 0.0
    last_at: float = float("inf")

    @property
    def part(self) -> Hashable:
        """The part of the store that has the key, because it may be silent while the others answer."""
        return self.leftover.store.part_of(self.leftover.key)


class Leftovers:
    """A thread that lives as long as there is something left to release.

    It is not the heartbeat's, which must not wait for a store that is away.
    """

    def __init__(self) -> None:
        self._start_over()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        self._left: deque[_Left] = deque()
        self._lock = threading.RLock()
        self._thread = OneThread("leftovers", self._run, self._lock)

    def add(self, leftover: Leftover, may_release: Callable[[], bool] = _at_once, *, may_arrive: bool = False) -> None:
        """Release *leftover* until that is answered, for one ttl: by then the store has freed it by itself.

        Arguments:
            leftover: What nobody holds any more, or will hold once *may_release* is true.
            may_release: Asked before each try.
            may_arrive: The request that makes it may still be under way, on another connection, where the release
                overtakes it. So it is released again and again for a while after the first answer.
        """
        with self._lock:
            self._left.append(_Left(leftover, clock() + leftover.ttl, may_release, may_arrive))
            self._thread.ensure()

    def _run(self) -> None:
        silent: dict[Hashable, float] = {}
        while (one := self._next()) is not None:
            is_put_aside = clock() < max(one.not_before, silent.get(one.part, 0.0))
            if clock() < one.give_up_at and (is_put_aside or not self._release(one, silent)):
                with self._lock:
                    self._left.append(one)
                time.sleep(_STEP if is_put_aside else _PAUSE)

    def _next(self) -> _Left | None:
        with self._lock:
            return self._left.popleft() if self._thread.goes_on(bool(self._left)) else None

    def _release(self, one: _Left, silent: dict[Hashable, float]) -> bool:
        leftover = one.leftover
        try:
            if not one.may_release():
                return False
            is_released = leftover.release_again()
            if not is_released:
                silent[one.part] = clock() + _SILENCE
            elif one.may_arrive:
                self._release_later(one)
            return is_released
        except Exception:
            event = "lock.unreleased key=%s task_id=%s: the release is broken"
            logger.exception(event, leftover.key, leftover.task_id)
            return False

    def _release_later(self, one: _Left) -> None:
        next_at, last_at = clock() + _PAUSE, min(one.last_at, clock() + _UNDER_WAY)
        with self._lock:
            self._left.append(one._replace(not_before=next_at, last_at=last_at, may_arrive=next_at < last_at))


leftovers = Leftovers()
