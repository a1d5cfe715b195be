"""The renewals of one store, in a thread of their own."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import ref

from celery_singleton_lock.errors import MAKES_WAY, LostReason, StoreError
from celery_singleton_lock.leases.one_thread import OneThread
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.leases.teller import scribe
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Answer

logger = logging.getLogger("celery_singleton_lock")

# Enough to connect anew to a store that is far away; each of its replies may take a second.
_LONGEST_RENEWAL = 5.0
_LONGEST_FORGET = 2.0
_SHORTEST_WAIT = 0.05
_LONGEST_SLEEP = 3600.0
_LOOK_AGAIN = 0.005
# Tasks that come one after another do not each start a thread.
_LINGERS = 5.0
# Of one beat, if it is the same for all: thousands of lines would keep a process from the next beat.
_MOST_LINES = 10
_NEVER = float("inf")
_REASONS: dict[Answer, LostReason] = {
    Answer.REPLACED: "replaced",
    Answer.BROKEN: "broken",
    Answer.TAKEN: "taken",
    Answer.GONE: "expired",
}


class Pulse:
    """Renews what a process holds in one store, each time that something is due.

    The thread starts with the first lease and ends when there has been none for
    a while. A short task that comes and goes in between does not wake it.

    Arguments:
        lock: The heartbeat's, an `RLock`, which it holds while it calls.
        ended: Called with this, under the lock, when nothing is left to renew.
    """

    def __init__(self, lock: threading.RLock, ended: Callable[["Pulse"], None]) -> None:
        self._lock = lock
        self._ended = ended
        # Weakly: a lease that nobody can reach any more is not to be renewed for ever. In
        # a dict for its order, and without callbacks, in which a signal's exception would vanish.
        self._watched: dict[ref[Renewal], None] = {}
        self._in_flight: frozenset[Renewal] = frozenset()
        self._wakes_at = _NEVER
        self._lingers_until = clock() + _LINGERS
        # Not a condition, whose methods are not safe where a signal may raise.
        self._alarm = threading.Lock()
        self._thread = OneThread("heartbeat", self._run, lock)
        self._pid = os.getpid()

    def watch(self, renewal: Renewal) -> None:
        """Renew it from now on."""
        with self._lock:
            self._watched[ref(renewal)] = None
            self._thread.ensure()
            if renewal.next_renewal < self._wakes_at:
                self._ring()

    def renew_all(self) -> None:
        """Renew everything at once: the store was out of reach, and may have lost what it knew."""
        if self._pid != os.getpid():
            # A parent's, whose lock may be taken for good.
            return
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

    def watched(self) -> list[Renewal]:
        """What is renewed, and somebody still has."""
        # A copy first, because this is also asked from a native thread that no lock of ours can be shared with.
        return [one for known in list(self._watched) if (one := known()) is not None and not one.is_over]

    def _run(self) -> None:
        while self._sleep():
            try:
                self._beat()
            except Exception as error:  # noqa: BLE001 (whatever is broken, the thread goes on; the scribe tells of it)
                # Whatever it was: a process whose leases nobody renews is worse.
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
                has_work = bool(self._watched) or now < self._lingers_until
                if not has_work:
                    self._ended(self)
                if not self._thread.goes_on(has_work):
                    # For the one that goes on, if there is one.
                    self._ring()
                    return False
                due = [min(one.next_renewal, one.deadline) for one in self.watched()]
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
        """Renew no longer what is lost; what was forgotten meanwhile is nobody's loss."""
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
        for renewal, answer in zip(renewals, answers, strict=True):
            reason = None if answer is Answer.DONE else _REASONS[answer]
            if reason is None or reason in MAKES_WAY:
                renewal.renewed(sent_at)
            if reason is not None:
                lost[renewal] = reason
        return lost

    def _try_again(self, renewals: list[Renewal], error: Exception) -> None:
        for renewal in renewals:
            renewal.unsure()
        for renewal in renewals[:_MOST_LINES]:
            event = "lock.unsure key=%s task_id=%s remaining=%.1f leases=%d: %s"
            facts = renewal.key, renewal.task_id, renewal.remaining, len(renewals), error
            scribe.tell(partial(logger.warning, event, *facts))

    def _patience(self) -> float:
        """How long a request may take, so that every loss is told when its deadline passes."""
        remaining = min((renewal.deadline for renewal in self.watched()), default=_NEVER) - clock()
        return min(_LONGEST_RENEWAL, max(_SHORTEST_WAIT, remaining))
