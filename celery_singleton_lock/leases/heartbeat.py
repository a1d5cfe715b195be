"""The renewal of every lease that a process holds."""

import logging
import os
from _queue import Empty, SimpleQueue
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from celery_singleton_lock.errors import MAKES_WAY, LostReason, StoreError
from celery_singleton_lock.leases.background import Background, DaemonThread, background
from celery_singleton_lock.leases.counters import count, counters
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.leases.greenlets import patched_by, start_native_thread
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Answer, Claim, lock_name_of
from celery_singleton_lock.stores.redis.store import Store

logger = logging.getLogger("celery_singleton_lock")

# Our clock and the server's may run at slightly different rates; Redlock's allowance.
_DRIFT = 0.01
_DRIFT_FLOOR = 0.002
_RENEWALS_PER_TTL = 3
_BEATS_PER_RENEWAL = 4
_LATE = 4
_SHORTEST_PAUSE = 0.05
# Enough to connect anew to a store that is far away; each of its replies may take a second.
_LONGEST_RENEWAL = 5.0
_LATE_RENEWAL = 1.0
_LONGEST_SLEEP = 3600.0
# Seconds without a lease after which the thread ends, so that short tasks one after another do not each start one.
_LINGERS = 5.0
# Equal lines in the log for one beat.
_MOST_LINES = 10
_NEVER = float("inf")
_REASONS: dict[Answer, LostReason] = {
    Answer.REPLACED: "replaced",
    Answer.BROKEN: "broken",
    Answer.TAKEN: "taken",
    Answer.GONE: "expired",
}


class Renewal:
    """A claim that has been granted and is kept alive, until it is released or lost.

    Arguments:
        store, claim: The store, and what it has granted.
        deadman: Kills this process at the deadline; each renewal moves it.
        on_lost: Called once with this object when it is lost, in the heartbeat's thread, so it must not take long.
    """

    thread: "RenewalThread | None" = None
    # On `clock()`. It counts from the moment the last answered request was sent, less an allowance for the drift of
    # clocks, so it never lies behind the store's own.
    deadline: float = 0.0
    next_renewal: float = 0.0
    # The last renewal was not answered, so it may have worked or not.
    is_unsure: bool = False
    lost_reason: LostReason | None = None
    # Nobody wants it any more.
    is_over: bool = False
    # The deadline for which it was said that the heartbeat is late: once for each stretch without a renewal.
    told_late_for: float | None = None

    def __init__(
        self,
        store: Store,
        claim: Claim,
        deadman: DeadMan | None = None,
        on_lost: Callable[[Any], None] | None = None,
    ) -> None:
        self.store = store
        self.claim = claim
        self.pid = os.getpid()
        self.key: str = claim.key
        self.ttl: float = claim.ttl
        self._deadman = deadman
        self._on_lost = on_lost

    @property
    def task_id(self) -> str | None:
        return self.claim.facts.task_id or None

    @property
    def time_left(self) -> float:
        """Seconds until the deadline; 0.0 once nobody wants it any more."""
        return 0.0 if self.is_over else max(0.0, self.deadline - clock())

    def is_due_soon(self, now: float) -> bool:
        """It is due, or will be soon: thousands of leases must not keep a process busy."""
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
        """Record that it is lost, and report it once."""
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
                self._on_lost(self)
        finally:
            # If the policy, or a person, has asked for this end, it is no error.
            level = logging.INFO if reason in MAKES_WAY else logging.ERROR
            event = "lock.lost key=%s task_id=%s reason=%s"
            background.submit(partial(logger.log, level, event, self.key, self.task_id, reason))

    @property
    def late(self) -> float:
        """Seconds by which the heartbeat was late to renew it; 0.0 if it was not, or if that was told before."""
        late = clock() - min(self.next_renewal, self.deadline)
        return late if late > self.ttl / _LATE and self.told_late_for != self.deadline else 0.0

    def late_line(self, leases: int = 1) -> Callable[[], None]:
        event = (
            "lock.late key=%s task_id=%s late=%.1f ttl=%.1f leases=%d: "
            "the heartbeat got no time to run; if the lease is lost, raise lock_ttl"
        )
        return partial(logger.warning, event, self.key, self.task_id, self.late, self.ttl, leases)

    def count_late(self) -> None:
        facts = self.claim.facts
        # A `Lock` has no task.
        task = facts.task_name or (lock_name_of(self.key) if facts.task_id else "")
        count(self.store, self.key, "late", task)

    def stop(self) -> None:
        """Renew it no longer: nobody wants it any more."""
        if self.thread is not None and not self.is_over and self.lost_reason is None and self.late:
            # A body that held the GIL to its end: the heartbeat will never see it.
            background.submit(self.late_line())
            self.told_late_for = self.deadline
            self.count_late()
        self.is_over = True
        if self.thread is not None:
            self.thread.remove(self)
        if self._deadman is not None:
            self._deadman.disarm()


class RenewalThread(DaemonThread):
    """Renews what a process holds in one store, or in one part of it, each time that something is due.

    Where threads are greenlets it is a native thread, which no greenlet can starve, with a client of its own. There it
    touches neither the log nor the event loop, whose locks are those of greenlets; a greenlet does so in its place.
    """

    def __init__(self, heartbeat: "Heartbeat", store: Store, part: Hashable) -> None:
        self.store = store
        self.part = part
        self._heartbeat = heartbeat
        self._client = store
        # Weakly: a lease that nobody can reach any more is not to be renewed for ever.
        self.watching: dict[ref[Renewal], None] = {}
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._wakes_at = _NEVER
        self._greenlet = Background(lambda: bool(self.watching)) if patched_by() is not None else None

    def add(self, renewal: Renewal) -> None:
        """Renew it from now on, for as long as something else refers to it."""
        renewal.thread = self
        self.watching[ref(renewal)] = None
        if self._greenlet is not None:
            self._greenlet.ensure()
        if self._begun is not self._running:
            self.ensure()
        # A short task that comes and goes between two beats does not wake the thread.
        if renewal.next_renewal < self._wakes_at:
            self._wakes.put(None)

    def remove(self, renewal: Renewal) -> None:
        """Stop renewing it. A request that is under way does no harm: it never brings back what was released."""
        self.watching.pop(ref(renewal), None)

    def watched(self) -> list[Renewal]:
        found = {known: known() for known in list(self.watching)}
        for known in [known for known, renewal in found.items() if renewal is None or renewal.is_over]:
            self.watching.pop(known, None)
        return [renewal for renewal in found.values() if renewal is not None and not renewal.is_over]

    def _start(self, run: Callable[[object], None], mark: object) -> None:
        self._heartbeat.threads.setdefault(self.part, self)
        start_native_thread(partial(run, mark))

    def _has_work(self) -> bool:
        return bool(self.watching)

    def _step(self) -> bool:
        """Sleep until something is due, or comes; then renew what is due."""
        # First: whoever comes while this looks at what is due has to wake it.
        self._wakes_at = _NEVER
        with suppress(Empty):
            while True:
                self._wakes.get_nowait()
        due = [min(one.next_renewal, one.deadline) for one in self.watched()]
        self._wakes_at = due_at = min(due, default=clock() + _LINGERS)
        with suppress(Empty):
            self._wakes.get(timeout=min(max(0.0, due_at - clock()), _LONGEST_SLEEP))
        if clock() < due_at:
            return True
        # Nobody would close the event loop of a native thread.
        if not due and self._greenlet is None:
            self._heartbeat.threads.pop(self.part, None)
            return False
        self._wakes_at = _NEVER
        try:
            self._report_late()
            self._beat()
        except Exception as error:  # noqa: BLE001 (whatever is broken, the thread goes on; the log tells)
            self._log(partial(logger.error, "lock.heartbeat_error: the thread goes on", exc_info=error))
            with suppress(Empty):
                self._wakes.get(timeout=1.0)
        return True

    def _beat(self) -> None:
        if self.store.has_parts:
            for renewal in self.watched():
                if self.store.part_of(renewal.key) is not self.part:
                    self._call(partial(self._heartbeat.watch, renewal))
                # A greenlet may do so only later, and its part may be back by then.
                if renewal.thread is not self:
                    self.remove(renewal)
        now = clock()
        for renewal in self.watched():
            # Only if it was asked in vain: a beat that comes late asks first.
            if renewal.is_unsure and renewal.deadline <= now:
                self._lose(renewal, "unreachable")
        if due := [renewal for renewal in self.watched() if renewal.is_due_soon(now)]:
            self._renew(due)

    def _renew(self, renewals: list[Renewal]) -> None:
        sent_at = clock()
        try:
            answers = self._ask(renewals)
        except StoreError as error:
            for renewal in renewals:
                renewal.unsure()
            for renewal in renewals[:_MOST_LINES]:
                event = "lock.renewal_failed key=%s task_id=%s remaining=%.1f leases=%d: %s"
                facts = renewal.key, renewal.task_id, renewal.time_left, len(renewals), error
                self._log(partial(logger.warning, event, *facts))
            return
        for renewal, answer in zip(renewals, answers, strict=True):
            if renewal.is_over:
                continue
            # A holder that is asked to make way keeps its lease until it has.
            if answer is Answer.DONE or _REASONS[answer] in MAKES_WAY:
                renewal.renewed(sent_at)
            if answer is not Answer.DONE:
                self._lose(renewal, _REASONS[answer])

    def _ask(self, renewals: list[Renewal]) -> list[Answer]:
        now = clock()
        # So that each loss is reported when its deadline passes. A beat that comes after it has the time of a reply.
        left = [max(renewal.deadline - now, 0.0) or _LATE_RENEWAL for renewal in self.watched()]
        bound = min(_LONGEST_RENEWAL, max(_SHORTEST_PAUSE, min(left, default=0.0)))
        try:
            if self._greenlet is not None and self._client is self.store:
                self._client = self.store.clone()
                self._client.on_clock_step = lambda by: self._call(partial(_report_step, self.store.address, by))
            return self._client.renew([renewal.claim for renewal in renewals], bound)
        except StoreError:
            raise
        except Exception as error:
            event = "lock.renewal_failed: the store %s raised an unexpected error"
            self._log(partial(logger.error, event, self.store.address, exc_info=error))
            raise StoreError(self.store.address, str(error)) from error

    def _lose(self, renewal: Renewal, reason: LostReason) -> None:
        self._call(partial(renewal.lose, reason))
        if reason not in MAKES_WAY:
            self.remove(renewal)

    def _report_late(self) -> None:
        late = [renewal for renewal in self.watched() if renewal.late]
        for renewal in late[:_MOST_LINES]:
            self._log(renewal.late_line(len(late)))
        for renewal in late:
            # Here, because a greenlet may count it only after the next beat.
            renewal.told_late_for = renewal.deadline
            self._call(renewal.count_late)

    def _log(self, line: Callable[[], object]) -> None:
        # Not here, because a handler may block.
        self._call(partial(background.submit, line))

    def _call(self, call: Callable[[], object]) -> None:
        if self._greenlet is None:
            call()
        else:
            # Without a start: in this thread it would become a greenlet of another event loop.
            self._greenlet.put(call)


class Heartbeat:
    """Keeps leases alive, and says so when one cannot be kept.

    A renewal has three outcomes. *Renewed*: the full ttl lies ahead again.
    *Lost*: the store says the lease is not ours any more. *Unsure*: the store
    did not answer; the renewal may have worked, so it is tried again, sooner,
    until the deadline passes, and only then is the lease lost. A beat that comes
    late, because the process got no time or a body held the GIL, asks first:
    nobody may have wanted the key, or somebody else may have kept the lease alive.

    Each store has a thread of its own, and each part of a store that has parts. So one
    that does not answer costs the leases of the others nothing.

    A signal may raise anywhere in `watch`, so what they share with those
    threads are dicts and queues of C, and no lock.
    """

    def __init__(self) -> None:
        self._start_over()

    def _start_over(self) -> None:
        self._pid = os.getpid()
        self.threads: dict[Hashable, RenewalThread] = {}

    def watch(self, renewal: Renewal) -> None:
        """Renew it from now on, for as long as something else refers to it."""
        if self._pid != renewal.pid:
            # After a fork, the threads and the counts are the parent's.
            self._start_over()
            counters.start_over()
        store = renewal.store
        part = store.part_of(renewal.key) if store.has_parts else store
        thread = self.threads.get(part)
        if thread is None:
            store.on_clock_step = partial(_report_step, store.address)
            thread = RenewalThread(self, store, part)
        thread.add(renewal)

    def watched(self) -> list[Renewal]:
        threads = list(self.threads.values()) if self._pid == os.getpid() else []
        return [renewal for thread in threads for renewal in thread.watched()]


def _report_step(address: str, seconds: float) -> None:
    event = (
        "lock.clock store=%s step=%+.1f: its clock was set by so many seconds, or that of its new master differs; "
        "leases have ended early, or last longer"
    )
    background.submit(partial(logger.warning, event, address, seconds))


heartbeat = Heartbeat()
