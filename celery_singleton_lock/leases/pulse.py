"""The renewals of one store, or of one part of it, in a thread of their own."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import ref

from celery_singleton_lock.errors import MAKES_WAY, LostReason, StoreError
from celery_singleton_lock.leases.one_thread import OneThread
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.leases.tally import Tally
from celery_singleton_lock.leases.teller import scribe
from celery_singleton_lock.stores.base import Store, clock, lock_name_of
from celery_singleton_lock.stores.records import Answer

logger = logging.getLogger("celery_singleton_lock")

# Enough to connect anew to a store that is far away; each of its replies may take a second.
_LONGEST_RENEWAL = 5.0
_LONGEST_FORGET = 2.0
_SHORTEST_WAIT = 0.05
_LONGEST_FLUSH = 1.0
# Seconds until counts are sent again to a store that has not answered.
_AGAIN = 15.0
_LONGEST_SLEEP = 3600.0
_LOOK_AGAIN = 0.005
# Seconds without a lease after which the thread ends, so that short tasks one after another do not each start one.
_LINGERS = 5.0
# Equal lines in the log for one beat: thousands of them would delay the next beat.
_MOST_LINES = 10
_NEVER = float("inf")
_REASONS: dict[Answer, LostReason] = {
    Answer.REPLACED: "replaced",
    Answer.BROKEN: "broken",
    Answer.TAKEN: "taken",
    Answer.GONE: "expired",
}


class Pulse:
    """Renews what a process holds in one store, or in one part of it, each time that something is due.

    The thread starts with the first lease and ends when there has been none for
    a while. A short task that comes and goes in between does not wake it.

    Arguments:
        lock: The heartbeat's, an `RLock`, which it holds while it calls.
        ended: Called with this, under the lock, when nothing is left to do.
        tally: What was counted, and is handed over to the store.
        sort: Called with this before each beat, to hand over what has gone to another part of the store.

    Attributes:
        store: The store.
    """

    def __init__(
        self,
        store: Store,
        lock: threading.RLock,
        ended: Callable[["Pulse"], None],
        tally: Tally,
        sort: Callable[["Pulse"], None] | None = None,
    ) -> None:
        self.store = store
        self._lock = lock
        self._ended = ended
        self._tally = tally
        self._sort = sort
        # Weakly: a lease that nobody can reach any more is not to be renewed for ever. In
        # a dict for its order, and without callbacks, in which a signal's exception would vanish.
        self._watched: dict[ref[Renewal], None] = {}
        self._in_flight: frozenset[Renewal] = frozenset()
        self._wakes_at = _NEVER
        self._lingers_until = clock() + _LINGERS
        # Not a condition, whose methods are not safe if a signal may raise.
        self._alarm = threading.Lock()
        self._thread = OneThread("heartbeat", self._run, lock)

    def watch(self, renewal: Renewal) -> None:
        """Renew it from now on."""
        with self._lock:
            self._watched[ref(renewal)] = None
            self._thread.ensure()
            if renewal.next_renewal < self._wakes_at:
                self._ring()

    def attend(self) -> None:
        """Hand over what was counted, in a while; called under the lock."""
        self._thread.ensure()
        # Under the lock, and after the start of the thread: if a signal raises before this step, the next count does
        # it again.
        self._tally.begin(self.store)
        if self._tally.due_at(self.store) < self._wakes_at:
            self._ring()

    def renew_all(self) -> None:
        """Renew everything at once: the store was out of reach, and may have lost what it knew."""
        with self._lock:
            for renewal in self.watched():
                renewal.next_renewal = min(renewal.next_renewal, clock())
            self._ring()

    def forget(self, renewal: Renewal) -> None:
        """Stop renewing it; no renewal of it is under way when this returns."""
        with self._lock:
            self._watched.pop(ref(renewal), None)
        if renewal in self._in_flight:
            give_up_at = clock() + _LONGEST_FORGET
            while renewal in self._in_flight and clock() < give_up_at:
                time.sleep(_LOOK_AGAIN)

    def let_go(self, renewal: Renewal) -> bool:
        """Leave it to another pulse; False if this pulse does not have it any more."""
        with self._lock:
            return ref(renewal) in self._watched and self._watched.pop(ref(renewal)) is None

    def watched(self) -> list[Renewal]:
        """The leases that are renewed and that something still refers to."""
        # A copy first, because this is also asked from a native thread that no lock of ours can be shared with.
        return [one for known in list(self._watched) if (one := known()) is not None and not one.is_over]

    def _run(self) -> None:
        while self._sleep():
            for step in (self._beat, self._hand_over_counts):
                try:
                    step()
                except Exception as error:  # noqa: BLE001 (whatever is broken, the thread goes on; the scribe tells)
                    # Go on after any error: a process whose leases nobody renews is worse.
                    with suppress(Exception):
                        scribe.tell(partial(logger.error, "lock.heartbeat stumbled and goes on", exc_info=error))

    def _sleep(self) -> bool:
        """Return when something is due; False if nothing will be."""
        while True:
            with self._lock:
                self._drop_those_left_behind()
                now = clock()
                if self._watched:
                    self._lingers_until = now + _LINGERS
                flush_at = self._tally.due_at(self.store)
                has_work = bool(self._watched) or now < self._lingers_until or flush_at < _NEVER
                if not has_work:
                    self._ended(self)
                if not self._thread.goes_on(has_work):
                    # Another thread may have taken over, and needs the alarm.
                    self._ring()
                    return False
                due = [min(one.next_renewal, one.deadline) for one in self.watched()]
                due += [flush_at] if flush_at < _NEVER else []
                self._wakes_at = min(due, default=self._lingers_until)
            remaining = self._wakes_at - clock()
            if remaining <= 0:
                return True
            self._alarm.acquire(timeout=min(remaining, _LONGEST_SLEEP))

    def _ring(self) -> None:
        # It may ring already.
        with suppress(RuntimeError):
            self._alarm.release()

    def _drop_those_left_behind(self) -> None:
        left = [known for known in list(self._watched) if (one := known()) is None or one.is_over]
        for known in left:
            del self._watched[known]

    def _beat(self) -> None:
        if self._sort is not None:
            self._sort(self)
        self._tell_late()
        self._tell(self._take_overdue())
        lost: dict[Renewal, LostReason] = {}
        try:
            lost = self._renew(self._take_due())
        finally:
            lost = self._put_down(lost)
        self._tell(lost)

    def _tell_late(self) -> None:
        late = clock() - self._wakes_at
        suffering = [renewal for renewal in self.watched() if renewal.suffers(late)]
        for renewal in suffering[:_MOST_LINES]:
            event = (
                "lock.late key=%s task_id=%s late=%.1f ttl=%.1f leases=%d: "
                "the heartbeat got no time to run; raise lock_ttl"
            )
            facts = renewal.key, renewal.task_id, late, renewal.ttl, len(suffering)
            scribe.tell(partial(logger.warning, event, *facts))
        for renewal in suffering:
            self._tally.add(self.store, renewal.key, "late", _task_of(renewal))

    def _tell(self, lost: dict[Renewal, LostReason]) -> None:
        for renewal, reason in lost.items():
            try:
                renewal.lose(reason)
            except Exception as error:  # noqa: BLE001 (whatever is broken, the thread goes on; the scribe tells of it)
                event = "lock.lost key=%s task_id=%s: telling of it has failed"
                scribe.tell(partial(logger.error, event, renewal.key, renewal.task_id, exc_info=error))

    def _take_overdue(self) -> dict[Renewal, LostReason]:
        with self._lock:
            now = clock()
            overdue = [renewal for renewal in self.watched() if renewal.is_unsure and renewal.deadline <= now]
            for renewal in overdue:
                del self._watched[ref(renewal)]
        return dict.fromkeys(overdue, "unreachable")

    def _take_due(self) -> list[Renewal]:
        with self._lock:
            now = clock()
            due = [renewal for renewal in self.watched() if renewal.goes_along(now)]
            self._in_flight = frozenset(due)
        return due

    def _put_down(self, lost: dict[Renewal, LostReason]) -> dict[Renewal, LostReason]:
        """Stop the renewal of lost leases; a lease that was forgotten meanwhile counts as no loss."""
        with self._lock:
            self._in_flight = frozenset()
            lost = {renewal: reason for renewal, reason in lost.items() if ref(renewal) in self._watched}
            for renewal, reason in lost.items():
                # A holder that is asked to make way keeps its lease until it has.
                if reason not in MAKES_WAY:
                    del self._watched[ref(renewal)]
        return lost

    def _renew(self, renewals: list[Renewal]) -> dict[Renewal, LostReason]:
        if not renewals:
            return {}
        sent_at = clock()
        try:
            answers = renewals[0].store.renew([renewal.claim for renewal in renewals], self._patience())
        except Exception as error:  # noqa: BLE001 (whatever is broken, the thread goes on; the scribe tells of it)
            if not isinstance(error, StoreError):
                event = "lock.unsure: the store %s is broken"
                scribe.tell(partial(logger.error, event, renewals[0].store.address, exc_info=error))
            self._try_again(renewals, error)
            return {}
        lost: dict[Renewal, LostReason] = {}
        unanswered: dict[Renewal, StoreError] = {}
        for renewal, answer in zip(renewals, answers, strict=True):
            if isinstance(answer, StoreError):
                unanswered[renewal] = answer
                continue
            reason = None if answer is Answer.DONE else _REASONS[answer]
            if reason is None or reason in MAKES_WAY:
                renewal.renewed(sent_at)
            if reason is not None:
                lost[renewal] = reason
        if unanswered:
            self._try_again(list(unanswered), next(iter(unanswered.values())))
        return lost

    def _try_again(self, renewals: list[Renewal], error: Exception) -> None:
        for renewal in renewals:
            renewal.unsure()
        for renewal in renewals[:_MOST_LINES]:
            event = "lock.unsure key=%s task_id=%s remaining=%.1f leases=%d: %s"
            facts = renewal.key, renewal.task_id, renewal.remaining, len(renewals), error
            scribe.tell(partial(logger.warning, event, *facts))

    def _hand_over_counts(self) -> None:
        now, renewals = clock(), self.watched()
        if now < self._tally.due_at(self.store):
            return
        if any(renewal.is_unsure for renewal in renewals):
            self._tally.put_off(self.store, now + _LONGEST_FLUSH)
            return
        # No renewal waits for this. After the next renewal there is time, because leases that are due soon are
        # renewed with it.
        renew_at = min((renewal.next_renewal for renewal in renewals), default=_NEVER)
        patience = min(_LONGEST_FLUSH, renew_at - now)
        if patience < _SHORTEST_WAIT:
            self._tally.put_off(self.store, renew_at)
            return
        try:
            self._tally.flush(self.store, patience)
        except StoreError as error:
            self._tally.put_off(self.store, clock() + _AGAIN)
            event = "lock.uncounted store=%s: %s; the counts are kept, and go with the next"
            scribe.tell(partial(logger.info, event, self.store.address, error.problem))

    def _patience(self) -> float:
        """How long a request may take, so that every loss is told when its deadline passes."""
        remaining = min((renewal.deadline for renewal in self.watched()), default=_NEVER) - clock()
        return min(_LONGEST_RENEWAL, max(_SHORTEST_WAIT, remaining))


def _task_of(renewal: Renewal) -> str:
    """The name of its task; empty for a `Lock`."""
    facts = renewal.claim.facts
    return facts.task_name or (lock_name_of(renewal.key) if facts.task_id else "")
