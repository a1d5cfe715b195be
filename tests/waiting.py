"""Waiting for a condition, with a deadline and a name for what did not happen."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout: float = 20.0) -> T:
    """Return the first true value of *condition*; fail if there is none within *timeout* seconds."""
    deadline = time.monotonic() + timeout
    while True:
        # Before the look, so that there is a last one after the deadline, however long this process has been paused.
        is_over = time.monotonic() > deadline
        value = condition()
        if value:
            return value
        if is_over:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(0.01)


def lasted(call: Callable[[], object]) -> float:
    """Seconds that it takes."""
    began = time.monotonic()
    call()
    return time.monotonic() - began
