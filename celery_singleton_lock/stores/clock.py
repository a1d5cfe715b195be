"""The clock by which deadlines are kept, and how far that of a server is ahead of it."""

import time
from collections.abc import Callable
from functools import partial

# CLOCK_BOOTTIME goes on while the machine is suspended, as the server's clock does.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# Clocks of two machines drift apart, and network and processes take their time.
_SMALLEST_STEP = 0.5
_WORST_RATE = 0.0001
# Seconds between two comparisons with our own clock.
_COMPARE_EVERY = 1.0

clock: Callable[[], float] = partial(time.clock_gettime, _CLOCK)
"""Seconds on the local clock by which deadlines are kept; it never steps."""


class ServerClock:
    """Compares a server's time with the local clock, which never steps."""

    ask_again_at: float = float("-inf")
    """On `clock()`; a server that did not tell its time is not asked before."""

    def __init__(self) -> None:
        self._latest = 0
        self._seen_at = float("-inf")
        # How far the server's clock is ahead of ours, at least and at most.
        self._ahead = float("-inf"), float("inf")

    def compare(self, now: int, sent_at: float) -> float:
        """By how many seconds it was set since the last time, 0.0 if it was not.

        The server's time was *now*, in microseconds, as it worked on a request that was sent at *sent_at*.
        """
        if sent_at < self._seen_at + _COMPARE_EVERY:
            return 0.0
        answered_at = clock()
        seconds = now / 1_000_000
        least_before, most_before = self._ahead
        self._ahead = least, most = seconds - answered_at, seconds - sent_at
        step = max(least - most_before, 0.0) + min(most - least_before, 0.0)
        drift = (answered_at - self._seen_at) * _WORST_RATE
        self._seen_at = answered_at
        if abs(step) <= _SMALLEST_STEP + drift:
            return 0.0
        self._latest = 0
        return step

    def now(self, longest: float = float("inf")) -> int | None:
        """The server's time in microseconds, greater than any before; None if the last comparison is *longest* ago."""
        at = clock()
        if self._seen_at == float("-inf") or at - self._seen_at > longest:
            return None
        self._latest = max(self._latest + 1, round((at + sum(self._ahead) / 2) * 1_000_000))
        return self._latest
