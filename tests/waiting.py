"""Waiting for a condition, with a deadline and a name for what did not happen."""

import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

from celery_singleton_lock.errors import StoreError

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout: float = 20.0) -> T:
    """Return the first true value of *condition*; fail if there is none within *timeout* seconds."""
    deadline = time.monotonic() + timeout
    while True:
        # Before the look, so that there is a last one after the deadline, however long this process has been paused.
        is_over = time.monotonic() > deadline
        problem = None
        try:
            if value := condition():
                return value
        except StoreError as error:
            # A machine that pauses for longer than a request may take is no fault.
            problem = error
        if is_over:
            raise AssertionError(f"not within {timeout:g} s: {what}") from problem
        time.sleep(0.01)


class Watch:
    """Measures the seconds of a block without those in which this process stood still, as on a machine that pauses."""

    seconds = 0.0
    _TICK = 0.1

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._ticking = threading.Thread(target=self._tick, daemon=True)
        self._ticking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._ticking.join()

    def _tick(self) -> None:
        before = time.monotonic()
        is_over = False
        while not is_over:
            is_over = self._over.wait(self._TICK)
            now = time.monotonic()
            self.seconds += min(now - before, 3 * self._TICK)
            before = now


def lasted(call: Callable[[], object]) -> float:
    """Seconds that *call* takes without those in which this process stood still."""
    with Watch() as watch:
        call()
    return watch.seconds
