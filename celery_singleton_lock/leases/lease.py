"""The right to run one key, for as long as the deadline lies ahead."""

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from celery_singleton_lock.errors import LockLost, SingletonLockError, StoreError
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.leases.heartbeat import Heartbeat
from celery_singleton_lock.leases.heartbeat import heartbeat as own_heartbeat
from celery_singleton_lock.leases.leftovers import leftovers
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant, Succession

logger = logging.getLogger("celery_singleton_lock")

# Our clock and the server's may run at slightly different rates; Redlock's allowance.
_DRIFT = 0.01
_DRIFT_FLOOR = 0.002
_RENEWALS_PER_TTL = 3
_SHORTEST_PAUSE = 0.05
_RELEASE_AGAIN_BOUND = 1.0


def new_token() -> str:
    """A token that nobody else has."""
    return secrets.token_urlsafe(12)


class Lease:
    """One execution's time-bound right to a lock key.

    A lease is not mutual exclusion of side effects: a process that is paused
    past its deadline wakes up without the lease and goes on until it looks.
    Call `check()` before a step that must not happen twice, and hand `fence`
    to a resource that can compare it with the greatest it has seen.

    Arguments:
        store: The store.
        key: The lock key.
        ttl: Seconds the lease lasts without renewal; the heartbeat renews it
            every third of that, which leaves room for two missed renewals.
        limit: How many may hold the key at once.
        facts, min_hold, succession, queued: See `Claim`.
        token: Proof of this claim, where somebody else has to know it; by default a fresh one.
        deadman: Kills this process at the deadline; armed anew by each renewal.
        on_lost: Called once with the lease, in the heartbeat's thread, when it is lost.
        heartbeat: Who renews it; by default the process's own.

    Attributes:
        store: The store.
        claim: What the store needs to grant and renew it.
        fence: A number greater than that of any earlier lease on the key.
        took_over: The holder before it died without a release.
        arguments: The newest ones that were left for this successor, or an empty text.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        ttl: float,
        limit: int = 1,
        facts: Mapping[str, str] | None = None,
        min_hold: float = 0.0,
        succession: Succession | None = None,
        queued: bool = False,
        token: str | None = None,
        deadman: DeadMan | None = None,
        on_lost: Callable[["Lease"], None] | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.store = store
        self.claim = Claim(key, token or new_token(), ttl, limit, facts or {}, min_hold, succession, queued)
        self._deadman = deadman
        self._heartbeat = heartbeat or own_heartbeat
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._asked = False
        self._unanswered = False
        self._place: int | None = None
        self._since = 0.0
        self._deadline = 0.0
        self._next_renewal = 0.0
        self._unsure = False
        self._lost_reason: str | None = None
        self.fence = 0
        self.took_over = False
        self.arguments = ""

    @property
    def key(self) -> str:
        """The lock key."""
        return self.claim.key

    @property
    def token(self) -> str:
        """Proof of this acquisition, fresh for each; not a secret, yet not to be reused."""
        return self.claim.token

    @property
    def ttl(self) -> float:
        """Seconds the lease lasts without renewal."""
        return self.claim.ttl

    @property
    def acquired_at(self) -> datetime:
        """When it was granted, by the store's clock, in UTC."""
        return datetime.fromtimestamp(self._since, UTC)

    @property
    def granted(self) -> bool:
        """The store has granted it, whatever has become of it since."""
        return self._place is not None

    @property
    def held(self) -> bool:
        """Granted to this process, and neither released nor lost."""
        return self.granted and self.unreleased and not self.lost

    @property
    def unreleased(self) -> bool:
        """There is, or may be, something in the store for this process to release."""
        return self._asked and self._pid == os.getpid()

    @property
    def lost(self) -> bool:
        """It ended while it was still wanted."""
        return self._lost_reason is not None

    @property
    def lost_reason(self) -> str | None:
        """`expired`, `taken`, `unreachable`, `replaced`, or None while it is not lost."""
        return self._lost_reason

    @property
    def deadline(self) -> float:
        """When it ends without another renewal, on `stores.base.clock()`.

        It counts from the moment the last answered request was sent, less an
        allowance for clock drift, so it never lies behind the store's own.
        """
        return self._deadline

    @property
    def is_unsure(self) -> bool:
        """The last renewal was not answered, so it may have worked or not."""
        return self._unsure

    @property
    def next_renewal(self) -> float:
        """When the heartbeat wants to renew it, on the same clock."""
        return self._next_renewal

    def remaining(self) -> float:
        """Seconds for which the lease is certainly ours; 0.0 once it is lost or released."""
        return max(0.0, self._deadline - clock()) if self.held else 0.0

    def check(self) -> None:
        """Return if the lease is ours at this moment.

        Raises:
            LockLost: It is not, or its deadline has passed unrenewed.
        """
        if self.remaining() <= 0.0:
            reason = "released" if not self._asked else "forked" if not self.unreleased else "expired"
            raise LockLost(self.key, self._lost_reason or reason)

    def acquire(self) -> Conflict | None:
        """Ask the store once for the lease.

        Returns:
            None if it is ours and under the heartbeat's care, else who holds it.

        Raises:
            StoreError: No answer. It may be ours all the same, so release it.
        """
        self._asked = self._unanswered = True
        answer = self.store.acquire(self.claim)
        self._unanswered = False
        if isinstance(answer, Conflict):
            self._asked = False
            return answer
        self._begin(answer)
        return None

    def wait(self, timeout: float | None = None) -> bool:
        """Queue for the lease, first come, first served, until it is ours or *timeout* seconds are over.

        The holder's release wakes whoever comes next. Where the holder died,
        the waiter wakes by itself at the deadline it was told.

        Returns:
            True if it is ours and under the heartbeat's care. If not, or after
            an exception, `release` gives the turn back.

        Raises:
            StoreError: No answer. It may be ours all the same, so release it.
        """
        give_up_at = None if timeout is None else clock() + timeout
        self._asked = True
        with self.store.waiter(self.claim) as waiter:
            while True:
                self._unanswered = True
                answer = waiter.ask()
                self._unanswered = False
                if isinstance(answer, Grant):
                    self._begin(answer)
                    return True
                patience = float("inf") if give_up_at is None else give_up_at - clock()
                if patience <= 0:
                    return False
                waiter.sleep(min(answer, patience))

    def _begin(self, grant: Grant) -> None:
        self._place, self._since = grant.place, grant.since
        self.fence, self.took_over, self.arguments = grant.fence, grant.took_over, grant.arguments
        self.renewed(grant.sent_at)
        self._heartbeat.watch(self)
        event = "lock.acquired key=%s task_id=%s fence=%d took_over=%s"
        logger.debug(event, self.key, self._task_id, self.fence, self.took_over)

    def release(self) -> Answer | None:
        """Give it back, or the turn in the queue, or whatever an unanswered request has left.

        The heartbeat lets go of it first, so nothing renews a released lease.
        Where the store does not answer, or has not answered the request for the
        lease either, it is released in the background, until the store must
        have freed the key by itself.

        Returns:
            What the store said, or None if it did not answer.

        Raises:
            SingletonLockError: It was released before, or belongs to the process
                that this one was forked from.
        """
        if not self.unreleased:
            why = "was released already" if self._pid == os.getpid() else f"belongs to the process {self._pid}"
            raise SingletonLockError(f"the lease on key={self.key} cannot be released here: it {why}")
        self._heartbeat.forget(self)
        if self._deadman is not None:
            self._deadman.disarm()
        # From here on the store may give it to somebody else, although no answer has come yet.
        self._deadline = 0.0
        answer = None if self._unanswered else self._ask_to_release()
        if answer is None:
            leftovers.add(self)
        elif answer is Answer.DONE:
            logger.debug("lock.released key=%s task_id=%s", self.key, self._task_id)
        else:
            self.lose("taken" if answer is Answer.TAKEN else "expired")
        self._asked = False
        return answer

    def _ask_to_release(self) -> Answer | None:
        try:
            return self.store.release(self.claim, self._place)
        except StoreError as error:
            logger.warning("lock.unreleased key=%s task_id=%s: %s", self.key, self._task_id, error)
            return None

    def release_again(self) -> bool:
        """Try once more to give back what a first release may not have; True once answered."""
        try:
            self.store.release(self.claim, self._place, bound=_RELEASE_AGAIN_BOUND)
        except StoreError:
            return False
        return True

    def renewed(self, sent_at: float) -> None:
        """Count the ttl from *sent_at*, when the answered request was sent."""
        self._deadline = sent_at + self.ttl * (1 - _DRIFT) - _DRIFT_FLOOR
        self._next_renewal = sent_at + self.ttl / _RENEWALS_PER_TTL
        self._unsure = False
        if self._deadman is not None:
            self._deadman.arm(self._deadline)

    def unsure(self, error: Exception) -> None:
        """A renewal was not answered: try again soon, the deadline stands."""
        self._unsure = True
        self._next_renewal = clock() + max(_SHORTEST_PAUSE, min(1.0, self.ttl / 15))
        event = "lock.unsure key=%s task_id=%s remaining=%.1f: %s"
        logger.warning(event, self.key, self._task_id, self.remaining(), error)

    def lose(self, reason: str) -> None:
        """Record that it is lost, and tell once."""
        if not self.held:
            return
        self._lost_reason = reason
        logger.error("lock.lost key=%s task_id=%s reason=%s", self.key, self._task_id, reason)
        if self._on_lost is not None:
            self._on_lost(self)

    @property
    def _task_id(self) -> str | None:
        return self.claim.facts.get("task_id")
