"""The clock of a store in memory. It is not the wall clock: setting or freezing that in a test moves no lock."""

import time

from celery_singleton_lock.stores.base import clock


class SteadyClock:
    """Begins at the time of day, in seconds since the epoch, and goes on steadily from there."""

    def __init__(self) -> None:
        self.reset()

    def __call__(self) -> float:
        """The time that it shows."""
        return self._ahead + clock()

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once."""
        self._ahead += seconds

    def reset(self) -> None:
        """Show the time of day again."""
        self._ahead = time.time() - clock()
