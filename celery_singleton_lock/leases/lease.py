"""The right to run one key, for as long as the deadline lies ahead."""

import asyncio
import logging
import os
from binascii import b2a_base64
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from weakref import ref

from celery_singleton_lock import signals
from celery_singleton_lock.errors import MAKES_WAY, LockLost, LostReason, NotHeldReason, SingletonLockError, StoreError
from celery_singleton_lock.leases.background import release_claim_later
from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.leases.heartbeat import Renewal, heartbeat
from celery_singleton_lock.leases.lines import tell_of_death
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Done, Ending, Grant
from celery_singleton_lock.stores.redis.store import Store

logger = logging.getLogger("celery_singleton_lock")

_LATE_BOUND = 1.0
_SAFE_IN_URLS = bytes.maketrans(b"+/", b"-_")


def new_token() -> str:
    """A token that nobody else has."""
    # Each comes from the kernel: if a process is copied, by a fork or from a snapshot, a batch would be used twice.
    return b2a_base64(os.urandom(12), newline=False).translate(_SAFE_IN_URLS).decode()


class Lease(Renewal):
    """One execution's time-bound right to a lock key.

    A lease is not mutual exclusion of side effects: a process that is paused
    past its deadline wakes up without the lease and continues until it checks.
    Call `check()` before a step that must not happen twice, and hand `fence`
    to a resource that can compare it with the greatest it has seen.

    The heartbeat renews it every third of its ttl, which leaves room for two
    missed renewals, and only while this object is referenced: a lease that nobody
    references any more expires.

    Arguments:
        store: The store.
        claim: What to ask the store for.
        deadman: Kills this process at the deadline; each renewal moves it.
        on_lost: Called once with the lease when it is lost, in the heartbeat's
            thread, so it must not take long.
        refused_at: When an earlier execution of the call was refused first, if one was.

    Attributes:
        key: The lock key.
        token: Proof of this acquisition, fresh for each; not a secret, yet not to be reused.
        ttl: Seconds the lease lasts without renewal.
        fence: A number greater than that of any earlier lease on the key.
        took_over: The holder before it died without a release.
        waited: Seconds between the first refusal and the grant; 0.0 if it was granted at once.
        refused_at: When it was refused first, by the store's clock, in microseconds; 0 if it was not.
        lost_reason: `expired`, `taken`, `unreachable`, `replaced`, `broken`, or None while it is not lost.
    """

    fence: int = 0
    took_over: bool = False
    waited: float = 0.0
    # The last request for it had no answer, so it may still be under way.
    is_unanswered: bool = False
    # When it was granted: by the local clock, and by the store's.
    began_at: float = 0.0
    _since = 0.0
    _place: int | None = None
    _takes = 1
    _asked = False
    _sender: Any = None
    _counted_as = ""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        *,
        deadman: DeadMan | None = None,
        on_lost: Callable[["Lease"], None] | None = None,
        refused_at: int = 0,
    ) -> None:
        super().__init__(store, claim, deadman, on_lost)
        self.token: str = claim.token
        self.refused_at: int = refused_at

    @property
    def acquired_at(self) -> datetime:
        """When it was granted, by the store's clock, in UTC."""
        return datetime.fromtimestamp(self._since, UTC)

    @property
    def held(self) -> bool:
        """Granted to this process, neither released nor lost, and its deadline lies ahead."""
        return self._is_kept and self.time_left > 0.0

    @property
    def lost(self) -> bool:
        """It ended while it was still wanted."""
        return self.lost_reason is not None

    def remaining(self) -> float:
        """Seconds for which the lease is certainly ours; 0.0 once it is lost or released."""
        return self.time_left if self._is_kept else 0.0

    def check(self) -> None:
        """Return if the lease is ours at this moment; if its deadline has passed unrenewed, the store is asked.

        Raises:
            LockLost: It is not, or the store has not answered within a second.
        """
        if self._is_kept and not self.time_left:
            self._ask_late()
        if self.remaining() <= 0.0:
            reason: NotHeldReason = "released" if not self._asked else "forked" if not self.unreleased else "expired"
            raise LockLost(self.key, self.lost_reason or reason)

    def _ask_late(self) -> None:
        """The heartbeat got no time to run, and the main process of a worker may have renewed it meanwhile."""
        sent_at = clock()
        with suppress(StoreError):
            if self.store.renew([self.claim], _LATE_BOUND) == [Answer.DONE]:
                self.renewed(sent_at)

    def release(self, ending: Ending | None = None) -> Answer | None:
        """Give back the lease, or the turn in the queue, or anything that an unanswered request has left.

        The heartbeat lets go of it first, so nothing renews a released lease.
        If the store does not answer, or has not answered the request for the lease, the
        release is repeated in the background, until the store must have freed the key
        by itself.

        Arguments:
            ending: What later deliveries of the run's message have to know, if it has ended for good.

        Returns:
            What the store said, or None if it did not answer, or was not asked because the lease was taken again.

        Raises:
            SingletonLockError: It was released before, or belongs to the process
                that this one was forked from.
        """
        if not self.unreleased:
            why = "was released already" if self.pid == os.getpid() else f"belongs to the process {self.pid}"
            raise SingletonLockError(f"the lease on key={self.key} cannot be released here: it {why}")
        if self._takes > 1:
            self._takes -= 1
            return None
        answer = self._give_back(ending)
        if answer is None:
            return None
        if answer <= Answer.TAKEN and self._place is not None:
            self.lose("taken" if answer is Answer.TAKEN else "expired")
            return answer
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("lock.released key=%s task_id=%s", self.key, self.task_id)
        if self._sender is not None:
            counters.add(self.store, self.key, "held", self._counted_as, value=clock() - self.began_at)
            if signals.lock_released.receivers:
                signals.lock_released.send(sender=self._sender, lease=self)
        return answer

    def _give_back(self, ending: Ending | None) -> Answer | None:
        answer = None
        try:
            # From here on the store may give it to somebody else, although no answer has come yet.
            self.stop()
            if not self.is_unanswered:
                answer = self.store.release(self.claim, self._place, ending=ending)
        except StoreError as error:
            logger.warning("lock.release_failed key=%s task_id=%s: %s", self.key, self.task_id, error)
        finally:
            if answer is None:
                # A time limit may have interrupted the release above before its end.
                self.stop()
                release_claim_later(self.store, self.claim, self._place, ending, may_arrive=self.is_unanswered)
            self._asked = False
        return answer

    @property
    def _is_kept(self) -> bool:
        return self.granted and self.unreleased and self.lost_reason is None

    # For those who take leases for others: tasks, `Lock` and beats.

    @property
    def granted(self) -> bool:
        """The store has granted it; it may be released or lost by now."""
        return self._place is not None

    @property
    def unreleased(self) -> bool:
        """There is, or may be, something in the store for this process to release."""
        return self._asked and self.pid == os.getpid()

    @property
    def keeps_others_out(self) -> bool:
        """It is held, or was asked to make way and has not done so."""
        return self.time_left > 0.0 and self.unreleased and self.lost_reason in (None, *MAKES_WAY)

    @property
    def takes(self) -> int:
        """How often it has to be released."""
        return self._takes if self.unreleased else 0

    def take_again(self) -> None:
        """Have it released once more often."""
        self._takes += 1

    def acquire(self) -> Grant | Conflict | Done:
        """Ask the store once for the lease; once granted, it is under the heartbeat's care.

        Raises:
            StoreError: No answer. It may be ours all the same, so release it.
            ConfigurationError: The kernel refuses the timer; release it.
        """
        self._asked = self.is_unanswered = True
        answer = self.store.acquire(self.claim)
        self.is_unanswered = False
        if not isinstance(answer, Grant):
            self._asked = False
            if isinstance(answer, Conflict):
                self.refused_at = self.refused_at or answer.at
            return answer
        self._begin(answer)
        return answer

    def report_granted(self, sender: Any, task: str) -> None:
        """Count its grant for a task, and send `lock_acquired`; its release will be reported as well.

        Arguments:
            sender: Of the signals.
            task: The task's name; empty for a `Lock`.
        """
        self._sender, self._counted_as = sender, task
        counters.add(self.store, self.key, "acquired", task, value=self.waited)
        if self.took_over:
            counters.add(self.store, self.key, "taken_over", task)
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send(sender=sender, lease=self)

    def wait(self, conflict: Conflict, timeout: float | None = None) -> Grant | Conflict | Done:
        """Queue for the lease, first come, first served, until it is ours or *timeout* seconds are over.

        The holder's release wakes the next in the queue. If the holder has died,
        the waiter wakes by itself at the holder's deadline.

        Returns:
            The grant, and then it is under the heartbeat's care. Otherwise *conflict*, with its times moved to now, or
            what the store has answered a copy; `release` gives the turn back, as after an exception.

        Raises:
            StoreError: No answer. It may be ours all the same, so release it.
            ConfigurationError: The kernel refuses the timer; release it.
        """
        began_at = clock()
        give_up_at = float("inf") if timeout is None else began_at + timeout
        self._asked = True
        with self.store.waiter(self.claim) as waiter:
            while True:
                self.is_unanswered = True
                answer = waiter.ask()
                self.is_unanswered = False
                if isinstance(answer, Grant):
                    self._begin(answer)
                    return answer
                if not isinstance(answer, float):
                    return answer
                now = clock()
                if now >= give_up_at:
                    return replace(conflict, at=conflict.at + round((now - began_at) * 1_000_000))
                waiter.sleep(min(answer, give_up_at - now))

    def _begin(self, grant: Grant) -> None:
        self._place, self._since, self.began_at = grant.place, grant.since, grant.sent_at
        self.fence, self.took_over = grant.fence, grant.took_over
        if self.refused_at:
            self.waited = max(0.0, grant.since - self.refused_at / 1_000_000)
        self.renewed(grant.sent_at)
        heartbeat.watch(self)
        if grant.died is not None:
            tell_of_death(self.key, grant.died)
        # INFO for a task only, because a task has logged that it waits.
        level = logging.INFO if self.waited and self.claim.facts.task_id else logging.DEBUG
        if logger.isEnabledFor(level):
            event = "lock.acquired key=%s task_id=%s fence=%d took_over=%s waited=%.1f"
            logger.log(level, event, self.key, self.task_id, self.fence, self.took_over, self.waited)


class NullLease:
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


NULL_LEASE = NullLease()


# Which leases the calling code runs under, and which it has taken through a `Lock`.

running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop  # noqa: SLF001
"""The event loop that this thread runs, or None. The public function raises then, which is slow."""

# Weakly, because contexts are copied and outlive what they were made for.
current: ContextVar[tuple["ref[Lease]", ...]] = ContextVar("current_lease", default=())


def current_lease() -> Lease | None:
    """The lease under which the calling code runs, or None if it runs under none."""
    leases = current.get()
    return leases[-1]() if leases else None


def held_here(key: str) -> Lease | None:
    """The lease on *key* under which the calling code runs, or None; a wait for that key would never end."""
    leases = [lease() for lease in current.get()]
    return next((lease for lease in leases if lease is not None and lease.key == key), None)


@dataclass(eq=False)
class Hold:
    """One take of a lease through a `Lock`; it keeps the lease."""

    lock: "ref[Any]"
    caller: tuple[int, int, object]  # process, thread and asyncio task
    lease: Lease
    takes: int  # how often the lease was taken by then
    statement: object = None  # the `with` that has taken it, if one has

    @property
    def lasts(self) -> bool:
        """It was not released, neither by the lock nor by the lease."""
        return self.lease.takes >= self.takes


KnownHolds = tuple[Callable[[], Hold | None], ...]

holds: ContextVar[KnownHolds] = ContextVar("holds", default=())
"""Nothing else keeps what `Lock.acquire` has taken. A block is kept by its `Lock`, as it may be left in any context.

Contexts are copied, so a copy may list what another thread or task has taken, or what was released meanwhile.
"""


def live_holds() -> KnownHolds:
    """Those that last."""
    return tuple([known for known in holds.get() if (hold := known()) is not None and hold.lasts])


def give_back(hold: Hold) -> None:
    """End it, and release its lease unless that was done."""
    holds.set(tuple([known for known in holds.get() if known() is not hold]))
    if (lock := hold.lock()) is not None:
        lock._blocks.pop(hold, None)  # noqa: SLF001 (it is this library's)
    if hold.lasts:
        hold.lease.release()
