"""A claim, from the first request for it to its release. Users see a granted one as a `Lease`.

A claim goes through these states. Each change is a single write, because a signal may raise between two:

    NEW            it is asked for                             ASKING
    ASKING         refused, and nothing of it is in the store  NEW
    ASKING         refused, and has a turn in the line         QUEUED
    ASKING         granted                                     HELD
    ASKING         no answer, and given back                   RELEASED
    QUEUED         it is asked for again                       ASKING
    QUEUED         its turn is given back                      RELEASED
    HELD           a successor, or a person, wants it to end   ASKED_TO_STOP
    HELD           gone, or not renewed by its deadline        LOST
    HELD           given back                                  RELEASED
    ASKED_TO_STOP  gone, or not renewed by its deadline        LOST
    ASKED_TO_STOP  given back                                  RELEASED
    LOST           given back: it may be in the store          RELEASED
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

from celery_singleton_lock import signals
from celery_singleton_lock.errors import (
    REASONS_TO_STOP,
    LockLost,
    LostReason,
    NotHeldReason,
    SingletonLockError,
    StoreError,
)
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.leases.counters import count, counters, note
from celery_singleton_lock.leases.heartbeat import Renewable, heartbeat, tell_late
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.leases.line import Bell, pause_after, pause_before
from celery_singleton_lock.log import log, logger
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import UNANSWERED, Claim, Conflict, Ending, Grant, Marker, Release, Verdict
from celery_singleton_lock.stores.redis.store import Store

if TYPE_CHECKING:
    from celery_singleton_lock.leases.interrupt import DeadMan

_LATE_BOUND = 1.0
_RAN_OUT = "its lease ran out without a release: it has died, is paused, or cannot reach the store"
# Seconds that a process has to report the loss of a lease before it is killed for that loss.
_LAST_WORDS = 1.0
# Ttls for which the store keeps a turn; a waiter asks at least once in a ttl.
_TURN_LASTS = 3


class State(IntEnum):
    """How far a claim is."""

    NEW = 0
    ASKING = 1  # a request for it is under way, or had no answer
    QUEUED = 2
    HELD = 3
    ASKED_TO_STOP = 4  # it is still ours, until its holder has ended
    LOST = 5
    RELEASED = 6


# Module globals: `State.NEW` costs a function call before Python 3.12.
NEW, ASKING, QUEUED, HELD, ASKED_TO_STOP, LOST, RELEASED = State
# In the order of the states.
_LEADS_TO = (
    (ASKING,),
    (HELD, NEW, QUEUED, RELEASED),
    (ASKING, RELEASED),
    (RELEASED, ASKED_TO_STOP, LOST),
    (LOST, RELEASED),
    (RELEASED,),
    (),
)


class Holding(Renewable):
    """A claim and its state; once granted it is kept alive by the heartbeat, until it is released or lost.

    Arguments:
        store: The store of the lock.
        claim: The request for the lock.
        on_lost: Called once when the holder has to stop, and once when the lease is lost. If it blocks, renewals wait.
        deadman: Kills this process at the deadline, which each renewal moves.
        sender: The task or `Lock` that sends the signals. With None, nothing is sent or counted.
    """

    grant: Grant = Grant(0, 0, 0.0, 0.0)  # the last that the store has given; a placeholder before that
    is_unanswered: bool = False  # released without the answer to a request, which may still reach the store
    takes: int = 1  # how many releases give it back
    ending: Ending | None = None  # the end of its run, for later deliveries; None once the store has it
    marker: Marker = "unknown"  # whether its release has left a marker
    _stopped_at: float = 0.0
    _is_reported: bool = False
    # Weak: otherwise a claim and its view would keep each other alive until the garbage collector runs.
    _view: "ref[Lease] | None" = None

    def __init__(
        self,
        store: Store,
        claim: Claim,
        on_lost: Callable[["Holding", LostReason], None] | None = None,
        deadman: "DeadMan | None" = None,
        sender: Any = None,
    ) -> None:
        # Set on the instance: these are read most, and reading a class default is four times slower.
        self.state: State = NEW
        self.fence: int = 0
        self.waited: float = 0.0
        # Why the holder was asked to stop, or else why the lease was lost. The reason stays when LOST becomes RELEASED.
        self.lost_reason: LostReason | None = None
        self.store: Store = store
        self.claim: Claim = claim
        self.key: str = claim.key
        self.ttl: float = claim.ttl
        self.task_id: str | None = claim.facts.task_id or None
        self._sender = sender
        # Empty for a `Lock`: names of locks may contain ids, and each name would be one more counter.
        self._task: str = getattr(sender, "name", "")
        self._on_lost = on_lost
        self.deadman = deadman
        self.pid: int = os.getpid()
        self.weak: ref[Any] = ref(self)

    def go_to(self, state: State) -> None:
        """Go to another state; a `RuntimeError` if the present one does not lead there."""
        # No call lies between this check and the write, so no signal and no other thread comes between them.
        if state not in _LEADS_TO[self.state]:
            raise RuntimeError(f"the lease on key={self.key} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @property
    def view(self) -> Lease:
        """The object that users get: the same for as long as anybody has it."""
        view = self._view() if self._view is not None else None
        if view is None:
            view = Lease(self)
            self._view = ref(view)
        return view

    @property
    def unreleased(self) -> bool:
        """There is, or may be, something in the store for this process to release."""
        return self.state is not NEW and self.state is not RELEASED and self.pid == os.getpid()

    @property
    def was_granted(self) -> bool:
        return self.fence > 0

    @property
    def is_kept(self) -> bool:
        """The heartbeat keeps it alive."""
        return self.state in (HELD, ASKED_TO_STOP)

    def remaining(self) -> float:
        return self.time_left if self.state is HELD else 0.0

    # Asking for it.

    def acquire(self) -> Verdict:
        """Ask the store once. After an error the caller has to release: the request may have worked."""
        self.go_to(ASKING)
        answer = self.store.acquire(self.claim)
        if isinstance(answer, Grant):
            self._begin(answer)
            return answer
        self.go_to(QUEUED if self.claim.waits_here else NEW)
        if isinstance(answer, Conflict):
            self.claim.refused_at = self.claim.refused_at or answer.at
        return answer

    def stand_in_line(self) -> None:
        """From now on, a refusal gives a turn in the line, at the position of the first refusal."""
        self.claim.waits_here = True
        self.claim.turn_for = _TURN_LASTS * self.ttl
        self.claim.rank = self.claim.refused_at

    def wait(self, timeout: float | None = None) -> Verdict:
        """After a refusal, wait in line for *timeout* seconds at most; errors as `acquire`.

        The holder's release wakes the next in line. If the holder has died, the first in line notice at its deadline.

        Returns:
            The last answer. Without a grant, or after an exception, the caller gives the turn back by `release`.
        """
        give_up_at = clock() + (float("inf") if timeout is None else timeout)
        self.stand_in_line()
        with Bell(self.store, self.claim.channel) as bell:
            bell.wait(pause_before(self.claim, give_up_at))
            answer = self.acquire()
            while pause := pause_after(answer, self.claim, give_up_at, is_deaf=bell.is_deaf):
                bell.wait(pause)
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
        if grant.died is not None:
            log.tell_of_death(self.key, grant.died, _RAN_OUT)
            note(self.store, self.key, "holder_died", "", grant.died.task_name or self._task, grant.died)
        # INFO for a task only, because a task has logged that it waits.
        level = logging.INFO if self.waited and self.task_id else logging.DEBUG
        if logger.isEnabledFor(level):
            told: dict[str, Any] = {"fence": self.fence, "took_over": grant.took_over, "waited": self.waited}
            log.write(level, "lock.acquired", key=self.key, task_id=self.task_id, **told)

    def report_granted(self) -> None:
        """Count the grant, and send `lock_acquired`. The release is then counted and sent as well."""
        self._is_reported = True
        counters.add(self.store, self.key, "acquired", self._task, "", self.waited)
        if (died := self.grant.died) is not None:
            counters.add(self.store, self.key, "taken_over", self._task)
            counters.add(self.store, self.key, "holder_died", died.task_name or self._task)
        if signals.lock_acquired.receivers:
            signals.lock_acquired.send(sender=self._sender, lease=self.view)

    # While it is held.

    def check(self) -> None:
        """See `Lease.check`."""
        reason: NotHeldReason | None = None
        if self.state is HELD and self.unreleased and not self.time_left:
            # The heartbeat got no time to run, but the main process of a worker may have renewed the lease.
            sent_at = clock()
            with suppress(StoreError):
                (answer,) = self.store.renew([self.claim], _LATE_BOUND)
                reason = self.answered(answer, sent_at)
        if reason is None and self.remaining() <= 0.0:
            ended: NotHeldReason = "released" if self.state is RELEASED else "forked"
            reason = "expired" if self.unreleased else ended
        if reason is not None:
            raise LockLost(self.key, self.lost_reason or reason)

    def lose(self, reason: LostReason) -> None:
        """Report the first request to stop, and the first loss. After a release nothing is lost."""
        if reason == "broken" and self.state is ASKED_TO_STOP:
            # A person's request outranks a successor's.
            self.lost_reason = reason
        try:
            self.go_to(ASKED_TO_STOP if reason in REASONS_TO_STOP else LOST)
        except RuntimeError:
            return
        self.report_lost(reason)

    def report_lost(self, reason: LostReason) -> None:
        # Set the reason at once: until then another thread sees the new state without it. An earlier reason stays.
        self.lost_reason = self.lost_reason or reason
        if is_killed := self.state is LOST and self.deadman is not None:
            # If what follows hangs, the kernel kills this process, and its parent tells of the loss.
            self.deadman.arm(min(self.deadline, clock() + _LAST_WORDS))
        try:
            if self._on_lost is not None:
                self._on_lost(self, reason)
        finally:
            if self._sender is not None:
                count(self.store, self.key, "lost", self._task, reason)
                note(self.store, self.key, "lost", reason, self._task, self.claim.facts)
                send = partial(signals.lock_lost.send, sender=self._sender, lease=self.view, reason=reason)
                background.submit(send)
            # If the policy, or a person, has asked for this end, it is no error.
            level = logging.INFO if reason in REASONS_TO_STOP else logging.ERROR
            who: dict[str, Any] = {"key": self.key, "task_id": self.task_id}
            background.submit(partial(log.write, level, "lock.lost", **who, reason=reason))
            if is_killed:
                background.submit(self._die)

    def _die(self) -> None:
        """Kill this process if its body still runs."""
        counters.flush()
        if self.state is LOST and self.deadman is not None:
            self.deadman.kill()

    # Giving it back.

    def release(self) -> None:
        """Give back the lease, or the turn in the line, or anything that an unanswered request has left.

        A release without an answer is repeated in the background, until the ttl has freed the key.
        """
        if self.let_go():
            self.give_back()

    def let_go(self) -> bool:
        """Count a release, or raise why it is not possible. True if it was the last: then call `give_back`."""
        if not self.unreleased:
            why = "was released already" if self.pid == os.getpid() else f"belongs to the process {self.pid}"
            raise SingletonLockError(f"the lease on key={self.key} cannot be released here: it {why}")
        if self.takes > 1:
            self.takes -= 1
            return False
        return True

    def give_back(self) -> None:
        """As `release`, but without checking `unreleased`, and without counting `takes`."""
        answer = self._end()
        self.marker = answer.marker
        if answer.marker == "none":
            self.ending = None
        if answer is UNANSWERED:
            return
        if answer.lost is not None and self.was_granted:
            if self.lost_reason is None:
                self.report_lost(answer.lost)
            return
        if logger.isEnabledFor(logging.DEBUG):
            log.write(logging.DEBUG, "lock.released", key=self.key, task_id=self.task_id)
        if self._is_reported:
            counters.add(self.store, self.key, "held", self._task, "", self._stopped_at - self.grant.sent_at)
            if signals.lock_released.receivers:
                signals.lock_released.send(sender=self._sender, lease=self.view)

    def _end(self) -> Release:
        answer = UNANSWERED
        self.is_unanswered = self.state is ASKING
        try:
            # Stop first: the store may grant the key to somebody else before its answer comes.
            self.stop()
            if not self.is_unanswered:
                answer = self.store.release(self.claim, self.grant.place, self.ending)
        except StoreError as error:
            log.write(logging.WARNING, "lock.release_failed", "%s", error, key=self.key, task_id=self.task_id)
        finally:
            if answer is UNANSWERED:
                # A time limit may have interrupted the release above before its end.
                self.stop()
                background.submit(self.pending_release())
        return answer

    def pending_release(self) -> PendingRelease:
        """The release to repeat until the lease and the time for redeliveries are both over."""
        release = partial(self.store.release, self.claim, self.grant.place, self.ending)
        give_up_at = clock() + max(self.ttl, self.ending.kept if self.ending is not None else 0.0)
        return PendingRelease(self.store, self.key, give_up_at, release, may_arrive=self.is_unanswered)

    def stop(self) -> None:
        """Stop renewing."""
        if self.state is not RELEASED:
            self._stopped_at = clock()
            if self.state is HELD and (late := self.lateness(self._stopped_at)):
                # The body held the GIL to its end, so the heartbeat will not notice that it was late.
                tell_late({self: late})
            self.go_to(RELEASED)
        if self.thread is not None:
            self.thread.remove(self)
        if self.deadman is not None:
            self.deadman.disarm()


class _Nothing(Holding):
    """The lease of a body without a lock, so that its `self.lock` is never None."""

    def check(self) -> None:
        """Return: there is nothing to lose."""

    def let_go(self) -> bool:
        """Return: there is nothing to give back."""
        return False


NULL_LEASE = _Nothing(cast("Store", None), Claim("", "", 0.0)).view
"""Not held, its fence is 0, and `check` returns."""
