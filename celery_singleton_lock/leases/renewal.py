"""The data of a lease that the heartbeat needs: how long it lasts, and when it has to be renewed."""

import logging
from collections.abc import Callable, Hashable
from functools import partial

from celery_singleton_lock.errors import MAKES_WAY, LostReason
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.leases.teller import scribe
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Claim

logger = logging.getLogger("celery_singleton_lock")

# Our clock and the server's may run at slightly different rates; Redlock's allowance.
_DRIFT = 0.01
_DRIFT_FLOOR = 0.002
_RENEWALS_PER_TTL = 3
_BEATS_PER_RENEWAL = 4
_SHORTEST_PAUSE = 0.05
_LATE = 4


class Renewal:
    """A claim that has been granted and is kept alive, until it ends or is lost.

    Arguments:
        store: The store.
        claim: What the store has granted.
        deadman: Kills this process at the deadline; each renewal moves it.
        on_lost: Called once when it is lost, in the thread that finds out. That is
            the heartbeat's, so it must not take long.

    Attributes:
        store: The store.
        claim: What the store has granted.
        part: The part of the store that has its key; None until the heartbeat has it.
        deadline: When it ends without another renewal, on `stores.base.clock()`. It counts
            from the moment the last answered request was sent, less an allowance for
            clock drift, so it never lies behind the store's own.
        next_renewal: When the heartbeat has to renew it, on the same clock.
        is_unsure: The last renewal was not answered, so it may have worked or not.
        lost_reason: Why it is lost, or None while it is not.
        is_over: Nobody wants it any more.
    """

    part: Hashable = None
    deadline: float = 0.0
    next_renewal: float = 0.0
    is_unsure: bool = False
    lost_reason: LostReason | None = None
    is_over: bool = False

    def __init__(
        self,
        store: Store,
        claim: Claim,
        deadman: DeadMan | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.claim = claim
        self._deadman = deadman
        self._on_lost = on_lost

    @property
    def key(self) -> str:
        """The lock key."""
        return self.claim.key

    @property
    def ttl(self) -> float:
        """Seconds it lasts without another renewal."""
        return self.claim.ttl

    @property
    def task_id(self) -> str | None:
        """The task id of the run that holds it, for the log."""
        return self.claim.facts.task_id or None

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; 0.0 once nobody wants it any more."""
        return 0.0 if self.is_over else max(0.0, self.deadline - clock())

    def suffers(self, delay: float) -> bool:
        """Whether a delay of so many seconds takes a fair part of its ttl."""
        return delay > self.ttl / _LATE

    def goes_along(self, now: float) -> bool:
        """It is due, or soon enough to be renewed with others: thousands of leases must not keep a process busy."""
        return self.next_renewal - now <= self.ttl / _RENEWALS_PER_TTL / _BEATS_PER_RENEWAL

    def renewed(self, sent_at: float) -> None:
        """Count the ttl from *sent_at*, when the answered request was sent.

        Raises:
            ConfigurationError: At the first call, if the kernel refuses the timer.
        """
        self.deadline = sent_at + self.ttl * (1 - _DRIFT) - _DRIFT_FLOOR
        self.next_renewal = sent_at + self.ttl / _RENEWALS_PER_TTL
        self.is_unsure = False
        if self._deadman is not None:
            self._deadman.arm(self.deadline)

    def unsure(self) -> None:
        """A renewal was not answered: try again soon, the deadline stands."""
        self.is_unsure = True
        self.next_renewal = clock() + max(_SHORTEST_PAUSE, min(1.0, self.ttl / 15))

    def lose(self, reason: LostReason) -> None:
        """Record that it is lost, and tell once."""
        if self.lost_reason is not None:
            if reason not in MAKES_WAY:
                # It was asked to make way, and now somebody else may have it.
                self.deadline = min(self.deadline, clock())
            elif reason == "broken" and self.lost_reason == "replaced":
                # A person asks it to end now, and then no successor takes over.
                self.lost_reason = reason
            return
        self.lost_reason = reason
        try:
            if self._on_lost is not None:
                self._on_lost()
        finally:
            event = "lock.lost key=%s task_id=%s reason=%s"
            if reason in MAKES_WAY:
                # The policy, or a person, has asked for this end, so it is no error.
                scribe.tell(partial(logger.info, event, self.key, self.task_id, reason))
            else:
                scribe.tell(partial(logger.error, event, self.key, self.task_id, reason))

    def end(self) -> None:
        """Let it last no longer: nobody wants it any more."""
        self.is_over = True
        if self._deadman is not None:
            self._deadman.disarm()
