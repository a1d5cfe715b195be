"""The renewal of every lease that a process holds."""

import logging
import os
from _queue import Empty, SimpleQueue
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from celery_singleton_lock.errors import REASONS_TO_STOP, LostReason, StoreError
from celery_singleton_lock.leases.background import Background, background
from celery_singleton_lock.leases.counters import count, counters
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Renewal, lock_name_of
from celery_singleton_lock.stores.redis.store import Store
from celery_singleton_lock.stores.threads import DaemonThread, patched_by, start_native_thread

if TYPE_CHECKING:
    from celery_singleton_lock.leases.holding import Holding

RENEWALS_PER_TTL = 3
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
# Why a holder has to stop, or has lost its lease, if the answer says so.
REASONS: dict[Renewal, LostReason | None] = {
    Renewal.RENEWED: None,
    Renewal.REPLACED: "replaced",
    Renewal.BROKEN: "broken",
    Renewal.TAKEN: "taken",
    Renewal.GONE: "expired",
}


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
        self.watching: dict[ref[Holding], None] = {}
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._wakes_at = _NEVER
        self._greenlet = Background(lambda: bool(self.watching)) if patched_by() is not None else None

    def add(self, holding: "Holding") -> None:
        """Renew it from now on, for as long as something else refers to it."""
        holding.thread = self
        self.watching[ref(holding)] = None
        if self._greenlet is not None:
            self._greenlet.ensure()
        if self._begun is not self._running:
            self.ensure()
        # A short task that comes and goes between two beats does not wake the thread.
        if holding.next_renewal < self._wakes_at:
            self._wakes.put(None)

    def remove(self, holding: "Holding") -> None:
        """Stop renewing it. A request that is under way does no harm: it never brings back what was released."""
        self.watching.pop(ref(holding), None)

    def watched(self) -> list["Holding"]:
        watched = []
        for known in list(self.watching):
            if (holding := known()) is not None and holding.is_kept:
                watched.append(holding)
            else:
                self.watching.pop(known, None)
        return watched

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
            if late := {holding: seconds for holding in self.watched() if (seconds := lateness(holding))}:
                self._call(partial(tell_late, late))
            self._beat()
        except Exception as error:  # noqa: BLE001 (whatever is broken, the thread goes on; the log tells)
            write = partial(log.write, logging.ERROR, "lock.bug", "the thread goes on", where="heartbeat")
            self._log(partial(write, exc_info=error))
            with suppress(Empty):
                self._wakes.get(timeout=1.0)
        return True

    def _beat(self) -> None:
        if self.store.has_parts:
            for holding in self.watched():
                if self.store.part_of(holding.key) is not self.part:
                    self._call(partial(self._heartbeat.watch, holding))
                # A greenlet may do so only later, and its part may be back by then.
                if holding.thread is not self:
                    self.remove(holding)
        now = clock()
        for holding in self.watched():
            # Only if it was asked in vain: a beat that comes late asks first.
            if holding.is_unsure and holding.deadline <= now:
                self._lose(holding, "unreachable")
        # What is due soon as well: thousands of leases must not keep a process busy.
        beats = RENEWALS_PER_TTL * _BEATS_PER_RENEWAL
        if due := [one for one in self.watched() if one.next_renewal - now <= one.ttl / beats]:
            self._renew(due)

    def _renew(self, holdings: list["Holding"]) -> None:
        sent_at = clock()
        try:
            answers = self._ask(holdings)
        except StoreError as error:
            for holding in holdings:
                holding.is_unsure = True
                # Soon again; the deadline stands.
                holding.next_renewal = clock() + max(_SHORTEST_PAUSE, min(1.0, holding.ttl / 15))
            for holding in [one for one in holdings if one.is_kept][:_MOST_LINES]:
                who = {"key": holding.key, "task_id": holding.task_id}
                told = {**who, "remaining": holding.time_left, "leases": len(holdings)}
                self._log(partial(log.write, logging.WARNING, "lock.renewal_failed", "%s", error, **told))
            return
        for holding, answer in zip(holdings, answers, strict=True):
            if not holding.is_kept:
                continue
            if (reason := holding.answered(answer, sent_at)) is not None:
                self._lose(holding, reason)

    def _ask(self, holdings: list["Holding"]) -> list[Renewal]:
        now = clock()
        # So that each loss is reported when its deadline passes. A beat that comes after it has the time of a reply.
        left = [max(holding.deadline - now, 0.0) or _LATE_RENEWAL for holding in self.watched()]
        bound = min(_LONGEST_RENEWAL, max(_SHORTEST_PAUSE, min(left, default=0.0)))
        for holding in holdings:
            # Who waits for an answer is not late.
            holding.next_renewal = now + bound
        try:
            if self._greenlet is not None and self._client is self.store:
                self._client = self.store.clone()
                self._client.on_clock_step = lambda by: self._call(partial(_report_step, self.store.address, by))
            return self._client.renew([holding.claim for holding in holdings], bound)
        except StoreError:
            raise
        except Exception as error:
            told = "leases at the store %s were not renewed", self.store.address
            self._log(partial(log.write, logging.ERROR, "lock.bug", *told, where="renewal", exc_info=error))
            raise StoreError(self.store.address, str(error)) from error

    def _lose(self, holding: "Holding", reason: LostReason) -> None:
        self._call(partial(holding.lose, reason))
        if reason not in REASONS_TO_STOP:
            self.remove(holding)

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

    A renewal has four outcomes. *Renewed*: the full ttl lies ahead again. *Asked to stop*: the same, and the holder has
    to end. *Lost*: the store says the lease is not ours any more. *Unsure*: the store did not answer; the renewal may
    have worked, so it is tried again, sooner, until the deadline passes, and only then is the lease lost. A beat that
    comes late, because the process got no time or a body held the GIL, asks first: nobody may have wanted the key, or
    somebody else may have kept the lease alive.

    Each store has a thread of its own, and each part of a store that has parts. So one that does not answer costs the
    leases of the others nothing. A signal may raise anywhere in `watch`, so what they share with those threads are
    dicts and queues of C, and no lock.
    """

    def __init__(self) -> None:
        self._pid = 0
        self.threads: dict[Hashable, RenewalThread] = {}

    def watch(self, holding: "Holding") -> None:
        """Renew it from now on, for as long as something else refers to it."""
        if self._pid != holding.pid:
            # After a fork, the threads are the parent's.
            self._pid, self.threads = holding.pid, {}
            counters.ensure_own()
        store = holding.store
        part = store.part_of(holding.key) if store.has_parts else store
        thread = self.threads.get(part)
        if thread is None:
            store.on_clock_step = partial(_report_step, store.address)
            thread = RenewalThread(self, store, part)
        thread.add(holding)

    def watched(self) -> list["Holding"]:
        threads = list(self.threads.values()) if self._pid == os.getpid() else []
        return [holding for thread in threads for holding in thread.watched()]


def lateness(holding: "Holding") -> float:
    """Seconds by which the heartbeat was late to renew it; 0.0 if it was not, or if that was asked before."""
    late = clock() - min(holding.next_renewal, holding.deadline)
    if late <= holding.ttl / _LATE or holding.told_late_for == holding.deadline:
        return 0.0
    holding.told_late_for = holding.deadline
    return late


def tell_late(late: dict["Holding", float]) -> None:
    """Log and count by how much each is late."""
    text = "the heartbeat got no time to run; if the lease is lost, raise lock_ttl"
    for number, (one, seconds) in enumerate(late.items()):
        if number < _MOST_LINES:
            told = {"key": one.key, "task_id": one.task_id, "late": seconds, "ttl": one.ttl, "leases": len(late)}
            background.submit(partial(log.write, logging.WARNING, "lock.late", text, **told))
        facts = one.claim.facts
        # A `Lock` has no task.
        task = facts.task_name or (lock_name_of(one.key) if facts.task_id else "")
        count(one.store, one.key, "late", task)


def _report_step(address: str, seconds: float) -> None:
    text = (
        "its clock was set by so many seconds, or that of its new master differs; leases have ended early, or last "
        "longer"
    )
    background.submit(partial(log.write, logging.WARNING, "lock.clock", text, store=address, step=seconds))


heartbeat = Heartbeat()
