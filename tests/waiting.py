"""Waiting for a condition, with a deadline and a name for what did not happen."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Self, TypeVar

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.clock import clock

SOON = 60
"""Seconds that are enough for anything that a worker does on a busy machine."""

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout: float = 20.0) -> T:
    """Return the first true value of *condition*; fail if there is none within *timeout* seconds."""
    deadline = time.monotonic() + timeout
    while True:
        # Compare first, so that a process that was paused beyond the deadline looks once more.
        is_over = time.monotonic() > deadline
        problem = None
        try:
            if value := condition():
                return value
        except StoreError as error:
            # Look again, because the machine may have paused during the request.
            problem = error
        if is_over:
            raise AssertionError(f"not within {timeout:g} s: {what}") from problem
        time.sleep(0.01)


class Pulse:
    """Measures for how many seconds this process has stood still, because the machine paused."""

    _TICK, _LATE = 0.05, 0.3

    def __init__(self) -> None:
        self._stood_still = 0.0
        self._begin()

    def _begin(self) -> None:
        self._beat_at, self._over = clock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(self._TICK):
            self._stood_still, self._beat_at = self.stood_still(), clock()

    def stood_still(self) -> float:
        since = clock() - self._beat_at
        return self._stood_still + (since if since > self._LATE else 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """End the thread during the block. If it waited for the GIL at a fork in C, the child would hang."""
        self._over.set()
        self._thread.join()
        try:
            yield
        finally:
            self._begin()


pulse = cache(Pulse)


class Watch:
    """Measures the seconds of a block without those in which this process stood still."""

    def __enter__(self) -> Self:
        self._began_at, self._before = clock(), pulse().stood_still()
        self._ended: float | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = self.seconds

    @property
    def seconds(self) -> float:
        if self._ended is not None:
            return self._ended
        return clock() - self._began_at - (pulse().stood_still() - self._before)


def lasted(call: Callable[[], object]) -> float:
    with Watch() as watch:
        call()
    return watch.seconds
