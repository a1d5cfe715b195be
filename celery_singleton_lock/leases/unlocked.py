"""The lock of a body that runs without one."""

from datetime import UTC, datetime

from celery_singleton_lock.errors import LostReason


class Unlocked:
    """A lease that was never granted, with all that a body reads of one: so one body serves both.

    It is not held, its fence is 0, and `check` returns.
    """

    key = ""
    token = ""
    ttl: float = 0.0
    fence = 0
    acquired_at: datetime = datetime.fromtimestamp(0, UTC)
    held = False
    lost = False
    lost_reason: LostReason | None = None
    took_over = False
    waited: float = 0.0

    def remaining(self) -> float:
        """0.0: nothing ends."""
        return 0.0

    def check(self) -> None:
        """Return: there is nothing to lose."""

    def release(self) -> None:
        """Return: there is nothing to give back."""


UNLOCKED = Unlocked()
