"""A claim, from the first request to the release. Users see a granted claim as a `Lease`.

docs/explanation/how-it-works.md draws its states.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

from celery_singleton_lock import errors, signals
from celery_singleton_lock.leases import heartbeat
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.leases.counters import count, counters, record
from celery_singleton_lock.leases.heartbeat import RenewalThread, tell_late
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.leases.line import bell, pause_after, pause_before
from celery_singleton_lock.log import log, logger
from celery_singleton_lock.stores import records
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import UNANSWERED, Claim, Conflict, Grant, Renewal, Verdict
from celery_singleton_lock.stores.redis.store import Store

if TYPE_CHECKING:
    from celery_singleton_lock.leases.interrupt import DeadMan

# Parts of a ttl. The holder's deadline comes a little early, because the server's clock may run faster than ours.
_RENEWED_AFTER = 1 / 3
_CERTAIN = 0.99
_DRIFT_FLOOR = 0.002  # seconds
# A part of a ttl. A renewal that is late by less is not worth a line in the log.
_LATE_AFTER = 1 / 4
_LATE_BOUND = 1.0
_RAN_OUT = "its lease ran out without a release: it has died, is paused, or cannot reach the store"
# Seconds to report a loss before the process is killed.
_LAST_WORDS = 1.0
# In ttls. A waiter asks at least once in a ttl.
_TURN_LASTS = 3


class State(IntEnum):
    """Each change is a single write, because a signal handler may raise between two."""

    NEW = 0
    ASKING = 1  # a request is under way, or got no answer
    QUEUED = 2  # it has a turn
    HELD = 3
    ASKED_TO_STOP = 4  # but it still has its lease
    LOST = 5  # but the store may still have it
    RELEASED = 6


# Module globals: `State.NEW` costs a function call before Python 3.12.
NEW, ASKING, QUEUED, HELD, ASKED_TO_STOP, LOST, RELEASED = State
_LEADS_TO = (
    (ASKING,),
    (HELD, NEW, QUEUED, RELEASED),
    (ASKING, RELEASED),
    (RELEASED, ASKED_TO_STOP, LOST),
    (LOST, RELEASED),
    (RELEASED,),
    (),
)
_REASONS: dict[Renewal, errors.LostReason | None] = {
    Renewal.RENEWED: None,
    Renewal.REPLACED: "replaced",
    Renewal.BROKEN: "broken",
    Renewal.TAKEN: "taken",
    Renewal.GONE: "expired",
}


class Holding:
    """A claim and its state. The heartbeat renews it once granted.

    Arguments:
        on_lost: Called once when the holder has to stop, and once when the lease is lost. It must not block, because
            renewals wait for it.
        deadman: Kills this process at the deadline, which each renewal moves.
        sender: The task or `Lock` that sends the signals. With None, no signal is sent, and no loss is counted.
    """

    grant: Grant = Grant(0, 0, 0.0, 0.0)
    # On `clock()`, and a little earlier than the store's own deadline.
    deadline: float = 0.0
    next_renewal: float = 0.0
    thread: RenewalThread | None = None
    is_unsure: bool = False  # the last renewal got no answer, so it may have worked or not
    _told_late_for: float = 0.0
    is_unanswered: bool = False  # released while a request may still reach the store
    takes: int = 1  # not yet released; a re-entrant `Lock` takes its lease several times
    ending: records.Ending | None = None  # of its run; None once no done marker has to be written any more
    marker: records.Marker = "unknown"
    _stopped_at: float = 0.0
    _is_reported: bool = False
    # Weak, otherwise only the garbage collector would free a claim and its view.
    _view: "ref[Lease] | None" = None

    def __init__(
        self,
        store: Store,
        claim: Claim,
        on_lost: Callable[["Holding", errors.LostReason], None] | None = None,
        deadman: "DeadMan | None" = None,
        sender: Any = None,
    ) -> None:
        # On the instance, because these are read most, and a class default is slower to read.
        self.state: State = NEW
        self.fence: int = 0
        self.waited: float = 0.0
        # Why the holder was asked to stop, or else why the lease was lost.
        self.lost_reason: errors.LostReason | None = None
        self.store: Store = store
        self.claim: Claim = claim
        self.key: str = claim.key
        self.ttl: float = claim.ttl
        self.task_id: str | None = claim.task_id or None
        self._sender = sender
        # Empty for a `Lock`, otherwise each name of a lock would add a counter.
        self.task_name: str = getattr(sender, "name", "")
        self._on_lost = on_lost
        self.deadman = deadman
        self.pid: int = os.getpid()
        self.weak: ref[Any] = ref(self)

    def go_to(self, state: State) -> None:
        # A call between check and write would let a signal handler or another thread change the state.
        if state not in _LEADS_TO[self.state]:
            raise RuntimeError(f"the lease on key={self.key} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @property
    def view(self) -> Lease:
        view = self._view() if self._view is not None else None
        if view is None:
            view = Lease(self)
            self._view = ref(view)
        return view

    @property
    def unreleased(self) -> bool:
        return self.state is not NEW and self.state is not RELEASED and self.pid == os.getpid()

    @property
    def was_granted(self) -> bool:
        return self.fence > 0

    @property
    def is_kept(self) -> bool:
        return self.state in (HELD, ASKED_TO_STOP)

    @property
    def time_left(self) -> float:
        """Seconds for which this process keeps others out, even if it is asked to stop."""
        return max(0.0, self.deadline - clock()) if self.is_kept and self.pid == os.getpid() else 0.0

    def remaining(self) -> float:
        return self.time_left if self.state is HELD else 0.0

    # Asking for it.

    def acquire(self) -> Verdict:
        """Ask once. After an error call `release`, because the request may have worked."""
        self.go_to(ASKING)
        answer = self.store.acquire(self.claim)
        if isinstance(answer, Grant):
            self._begin(answer)
        else:
            self.go_to(QUEUED if self.claim.waits_here else NEW)
            if isinstance(answer, Conflict):
                self.claim.refused_at = self.claim.refused_at or answer.at
        return answer

    def stand_in_line(self) -> None:
        self.claim.waits_here = True
        self.claim.turn_for = _TURN_LASTS * self.ttl
        self.claim.rank = self.claim.refused_at

    def wait(self, timeout: float | None = None) -> Verdict:
        """Wait in line for at most *timeout* seconds. Without a grant, or after an exception, call `release`."""
        give_up_at = clock() + (float("inf") if timeout is None else timeout)
        self.stand_in_line()
        with bell(self.store, self.claim.channel) as wait:
            wait(pause_before(self.claim, give_up_at))
            answer = self.acquire()
            while pause := pause_after(answer, self.claim, self.store, give_up_at):
                wait(pause)
                answer = self.acquire()
            return answer

    def _begin(self, grant: Grant) -> None:
        self.grant = grant
        self.fence = grant.fence
        if self.claim.refused_at:
            self.waited = max(0.0, grant.since - self.claim.refused_at / 1_000_000)
        self.go_to(HELD)
        self.renewed(grant.sent_at)
        heartbeat.watch(self)
        if (died := grant.died) is not None:
            died_task = died.task_name or self.task_name
            log.tell_of_death(self.key, died, _RAN_OUT)
            record(self.store, self.key, "holder_died", "", died_task, died)
            count(self.store, self.key, "holder_died", died_task)
            count(self.store, self.key, "taken_over", self.task_name)
        level = logging.INFO if self.waited and self.task_id else logging.DEBUG
        if logger.isEnabledFor(level):
            told: dict[str, Any] = {"fence": self.fence, "took_over": grant.took_over, "waited": self.waited}
            log.write(level, "lock.acquired", key=self.key, task_id=self.task_id, **told)

    def report_granted(self) -> None:
        self._is_reported = True
        counters.add(self.store, self.key, "acquired", self.task_name, "", self.waited)
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send(sender=self._sender, lease=self.view)

    # While it is held.

    def renewed(self, sent_at: float) -> None:
        """Count the ttl from *sent_at*, before the request: otherwise the deadline could be later than the store's."""
        self.deadline = sent_at + self.ttl * _CERTAIN - _DRIFT_FLOOR
        self.next_renewal = sent_at + self.ttl * _RENEWED_AFTER
        self.is_unsure = False
        if self.deadman is not None:
            self.deadman.arm(self.deadline)

    def answered(self, answer: Renewal, sent_at: float) -> errors.LostReason | None:
        """Returns why the lease is lost, or why the holder has to stop; None if neither."""
        reason = _REASONS[answer]
        if reason is None or reason in errors.REASONS_TO_STOP:
            self.renewed(sent_at)
        return reason

    def lateness(self, now: float) -> float:
        """Seconds by which the renewal is late, or 0.0 if it is in time, or the delay was logged before."""
        if now < self.next_renewal <= self.deadline:
            return 0.0
        late = now - min(self.next_renewal, self.deadline)
        if late <= self.ttl * _LATE_AFTER or self._told_late_for == self.deadline:
            return 0.0
        self._told_late_for = self.deadline
        return late

    def check(self) -> None:
        reason: errors.NotHeldReason | None = None
        if self.state is HELD and self.unreleased and not self.time_left:
            # The heartbeat got no time to run, but a main process may have renewed the lease.
            sent_at = clock()
            with suppress(errors.StoreError):
                (answer,) = self.store.renew([self.claim], _LATE_BOUND)
                reason = self.answered(answer, sent_at)
        if reason is None and self.remaining() <= 0.0:
            ended: errors.NotHeldReason = "released" if self.state is RELEASED else "forked"
            reason = "expired" if self.unreleased else ended
        if reason is not None:
            raise errors.LockLost(self.key, self.lost_reason or reason)

    def lose(self, reason: errors.LostReason) -> None:
        if reason == "broken" and self.state is ASKED_TO_STOP:
            # A person's request outranks that of a successor.
            self.lost_reason = reason
        state = ASKED_TO_STOP if reason in errors.REASONS_TO_STOP else LOST
        # The holder may be asked twice, or have released meanwhile.
        if state in _LEADS_TO[self.state]:
            self.state = state
            self.report_lost(reason)

    def report_lost(self, reason: errors.LostReason) -> None:
        # Set the reason first, because `_on_lost` and receivers read it.
        self.lost_reason = self.lost_reason or reason
        if is_killed := self.state is LOST and self.deadman is not None:
            # If a step below hangs, the kernel kills this process, and its parent reports the loss.
            self.deadman.arm(min(self.deadline, clock() + _LAST_WORDS))
        try:
            if self._on_lost is not None:
                self._on_lost(self, reason)
        finally:
            if self._sender is not None:
                count(self.store, self.key, "lost", self.task_name, reason)
                record(self.store, self.key, "lost", reason, self.task_name, self.claim)
                send = partial(signals.lock_lost.send, sender=self._sender, lease=self.view, reason=reason)
                background.submit(send)
            write = log.info if reason in errors.REASONS_TO_STOP else log.error
            who: dict[str, Any] = {"key": self.key, "task_id": self.task_id}
            background.submit(partial(write, "lock.lost", **who, reason=reason))
            if is_killed:
                background.submit(self._die)

    def _die(self) -> None:
        counters.flush()
        if self.state is LOST and self.deadman is not None:
            self.deadman.kill()

    # Giving it back.

    def release(self) -> None:
        """Give back the lease or the turn, or whatever an unanswered request has left.

        A release without an answer is repeated in the background until the ttl has freed the key.
        """
        if self.let_go():
            self.give_back()

    def let_go(self) -> bool:
        """Count a release. True tells the caller to call `give_back`."""
        if not self.unreleased:
            why = "was released already" if self.pid == os.getpid() else f"belongs to the process {self.pid}"
            raise errors.SingletonLockError(f"the lease on key={self.key} cannot be released here: it {why}")
        if self.takes > 1:
            self.takes -= 1
            return False
        return True

    def give_back(self) -> None:
        """As `release`, without checking `unreleased` or counting `takes`."""
        answer = UNANSWERED
        self.is_unanswered = self.state is ASKING
        try:
            # Stop first, because the store may grant the key to another holder before it answers.
            self.stop_keeping()
            if not self.is_unanswered:
                answer = self.store.release(self.claim, self.grant.place, self.ending)
        except errors.StoreError as error:
            log.warning("lock.release_failed", "%s", error, key=self.key, task_id=self.task_id)
        finally:
            self.marker = answer.marker
            self.ending = None if answer.marker == "none" else self.ending
            if answer is UNANSWERED:
                # A soft time limit may have interrupted the `stop_keeping` above.
                self.stop_keeping()
                background.submit(self.pending_release())
        if answer.lost is not None and self.was_granted:
            if self.lost_reason is None:
                self.report_lost(answer.lost)
        elif answer is not UNANSWERED:
            if logger.isEnabledFor(logging.DEBUG):
                log.debug("lock.released", key=self.key, task_id=self.task_id)
            if self._is_reported:
                counters.add(self.store, self.key, "held", self.task_name, "", self._stopped_at - self.grant.sent_at)
                if signals.lock_released.receivers:
                    signals.lock_released.send(sender=self._sender, lease=self.view)

    def pending_release(self) -> PendingRelease:
        release = partial(self.store.release, self.claim, self.grant.place, self.ending)
        give_up_at = clock() + max(self.ttl, self.ending.kept if self.ending is not None else 0.0)
        part = partial(self.store.servers.part_of, self.key)
        return PendingRelease(part, give_up_at, release, may_arrive=self.is_unanswered)

    def stop_keeping(self) -> None:
        if self.state is not RELEASED:
            self._stopped_at = clock()
            if self.state is HELD and (late := self.lateness(self._stopped_at)):
                # A body that holds the GIL to its end keeps the heartbeat from noticing the delay.
                tell_late({self: late})
            self.go_to(RELEASED)
        if self.thread is not None:
            self.thread.remove(self)
        if self.deadman is not None:
            self.deadman.disarm()


class _Nothing(Holding):
    def check(self) -> None:
        """Do nothing, because there is no lease to lose."""

    def let_go(self) -> bool:
        return False


NULL_LEASE = _Nothing(cast("Store", None), Claim("", "", 0.0)).view
"""The lease of a body without a lock."""
