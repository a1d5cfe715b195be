"""What a process has seen of a server's clock: whether somebody has set it, and what no fence may fall below."""

from collections.abc import Callable

from celery_singleton_lock.stores.base import clock

# Clocks of two machines drift apart, and network and processes take their time.
_SMALLEST_STEP = 0.5
_WORST_RATE = 0.0001


class ServerClock:
    """Compares what a server says of the time with the local clock that never steps.

    Arguments:
        stepped: Called with the seconds by which the server's clock was set.

    Attributes:
        highest: The highest time that the server has told, in microseconds.
        is_behind: It has told an earlier time since, so its clock was set back.
    """

    def __init__(self, stepped: Callable[[float], None]) -> None:
        self._stepped = stepped
        self._seen_at = float("-inf")
        self._ahead = float("-inf"), float("inf")
        self.highest = 0
        self.is_behind = False

    def lowest_fence(self) -> int:
        """What the next fence must not be below; 0 where the server's clock sees to that."""
        return self.highest + 1 if self.is_behind else 0

    def has_given(self, fence: int) -> bool:
        """Whether *fence* is above all that this process has seen; if so, the next one is above it as well."""
        is_above = not self.is_behind or fence > self.highest
        self.highest = max(self.highest, fence) if self.is_behind else self.highest
        return is_above

    def tells(self, now: int, sent_at: float) -> None:
        """It was *now*, in microseconds, when the server worked on a request that was sent at *sent_at*."""
        answered_at = clock()
        if sent_at < self._seen_at:
            # It may be older than what was heard last.
            return
        least, most = now / 1_000_000 - answered_at, now / 1_000_000 - sent_at
        before, drift = self._ahead, (answered_at - self._seen_at) * _WORST_RATE
        self._ahead, self._seen_at = (least, most), answered_at
        # Exactly, because this was sent after all that was heard before.
        self.is_behind = now <= self.highest
        self.highest = max(self.highest, now)
        step = max(0.0, least - before[1]) or min(0.0, most - before[0])
        if before[1] < float("inf") and abs(step) > _SMALLEST_STEP + drift:
            self._stepped(step)
