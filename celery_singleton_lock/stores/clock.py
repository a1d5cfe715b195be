"""The local clock, by which deadlines are kept, and the clock of a server."""

import time
from collections.abc import Callable
from functools import partial

# While a machine is suspended, its leases expire on the server, so its clock has to count that time.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_SMALLEST_STEP = 0.5  # a smaller one cannot be told from drift and delay
_WORST_RATE = 0.0001
_COMPARE_EVERY = 1.0

clock: Callable[[], float] = partial(time.clock_gettime, _CLOCK)  # in seconds; never set


class ServerClock:
    """The time of a server, and the steps by which it was set."""

    ask_again_at: float = float("-inf")  # on `clock()`: when to ask a silent server
    compares_at: float = float("-inf")

    def __init__(self) -> None:
        self._latest = 0
        self._seen_at = float("-inf")
        self._ahead = float("-inf"), float("inf")  # by how much the server's clock leads: at least, at most

    def compare(self, now: int, sent_at: float) -> float:
        """The seconds by which the server's clock was set since the last comparison; 0.0 if it was not set.

        *now* is the server's time in microseconds, in the answer to a request that was sent at *sent_at*.
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
        """The server's time in microseconds, greater each time; None if the last comparison is older than *longest*."""
        at = clock()
        if self._seen_at == float("-inf") or at - self._seen_at > longest:
            return None
        self._latest = max(self._latest + 1, round((at + sum(self._ahead) / 2) * 1_000_000))
        return self._latest
