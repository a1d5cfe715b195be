"""A process's view of a server's clock: whether it was set, and the least value that the next fence may have."""

from collections.abc import Callable

from celery_singleton_lock.stores.base import clock

# Clocks of two machines drift apart, and network and processes take their time.
_SMALLEST_STEP = 0.5
_WORST_RATE = 0.0001
# Seconds between two comparisons with our own clock, on the usual path.
_COMPARE_EVERY = 1.0


class ServerClock:
    """Compares a server's time with the local clock, which never steps.

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
        self._compare_at = float("-inf")
        self.highest = 0
        self.is_behind = False

    def lowest_fence(self) -> int:
        """The least value of the next fence; 0 if the server's clock ensures it."""
        return self.highest + 1 if self.is_behind else 0

    def has_given(self, fence: int) -> bool:
        """Whether *fence* is above all that this process has seen; if so, the next one is above it as well."""
        is_above = not self.is_behind or fence > self.highest
        self.highest = max(self.highest, fence) if self.is_behind else self.highest
        return is_above

    def follow(self, before: "ServerClock") -> None:
        """Go on from the clock of another server whose locks this server has from now on."""
        self.highest = max(self.highest, before.highest)
        if self._seen_at == float("-inf"):
            self._ahead, self._seen_at = before.last_seen

    @property
    def last_seen(self) -> tuple[tuple[float, float], float]:
        """How far the server's clock is ahead of ours, at least and at most, and when it said so."""
        return self._ahead, self._seen_at

    def goes_on(self, now: int, sent_at: float) -> bool:
        """As `tells`, at less cost; False if *now* is too early for a fence."""
        if now <= self.highest and sent_at >= self._seen_at:
            return False
        if sent_at > self._compare_at:
            self.tells(now, sent_at)
            return not self.is_behind
        self.highest = max(self.highest, now)
        self._seen_at = clock()
        return True

    def tells(self, now: int, sent_at: float) -> None:
        """The server's time was *now*, in microseconds, as it worked on a request that was sent at *sent_at*."""
        answered_at = clock()
        if sent_at < self._seen_at:
            # This time may be older than the last one that was heard.
            return
        seconds = now / 1_000_000
        least_before, most_before = self._ahead
        self._ahead = least, most = seconds - answered_at, seconds - sent_at
        # This comparison is exact, because the request was sent after every time that was heard before.
        self.is_behind = now <= self.highest
        if not self.is_behind:
            self.highest = now
        step = least - most_before if least > most_before else most - least_before if most < least_before else 0.0
        drift = (answered_at - self._seen_at) * _WORST_RATE
        self._seen_at, self._compare_at = answered_at, answered_at + _COMPARE_EVERY
        if abs(step) > _SMALLEST_STEP + drift:
            self._stepped(step)
