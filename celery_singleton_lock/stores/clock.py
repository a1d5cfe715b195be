"""The local clock for deadlines, and the clock of a server."""

import time
from collections.abc import Callable
from functools import partial

# Leases expire on the server while this machine is suspended, so the clock must count that time.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_SMALLEST_STEP = 0.5  # seconds; a smaller step may be a gradual correction of the clock
_WORST_RATE = 0.0001
_COMPARE_EVERY = 1.0

clock: Callable[[], float] = partial(time.clock_gettime, _CLOCK)  # in seconds; nobody can set it


class ServerClock:
    """Estimates a server's time, and notices when its clock is set."""

    ask_again_at: float = float("-inf")  # on `clock()`, for a server that is silent
    compares_at: float = float("-inf")  # on `clock()`

    def __init__(self) -> None:
        self._latest = 0
        self._seen_at = float("-inf")
        self._ahead = float("-inf"), float("inf")  # seconds by which the server's clock leads: least, most

    def compare(self, now: int, sent_at: float) -> float:
        """The seconds by which the server's clock was set since the last comparison.

        *now* is the server's answer, in microseconds, to a request that was sent at *sent_at* on `clock()`.
        """
        if sent_at < self.compares_at:
            return 0.0
        answered_at = clock()
        seconds = now / 1_000_000
        least_before, most_before = self._ahead
        self._ahead = least, most = seconds - answered_at, seconds - sent_at
        step = max(least - most_before, 0.0) + min(most - least_before, 0.0)
        drift = (answered_at - self._seen_at) * _WORST_RATE
        self._seen_at = answered_at
        self.compares_at = answered_at + _COMPARE_EVERY
        if abs(step) <= _SMALLEST_STEP + drift:
            return 0.0
        self._latest = 0
        return step

    def now(self, longest: float = float("inf")) -> int | None:
        """The server's time in microseconds, greater each time. None if the last comparison is older than *longest*."""
        at = clock()
        if self._seen_at == float("-inf") or at - self._seen_at > longest:
            return None
        self._latest = max(self._latest + 1, round((at + sum(self._ahead) / 2) * 1_000_000))
        return self._latest
