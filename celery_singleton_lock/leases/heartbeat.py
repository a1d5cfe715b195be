"""One thread per process that renews every lease the process holds."""

import logging
import os
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.leases.greenlets import patched_by
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Answer

if TYPE_CHECKING:
    from celery_singleton_lock.leases.lease import Lease

logger = logging.getLogger("celery_singleton_lock")

_LONGEST_RENEWAL = 1.0
_SHORTEST_WAIT = 0.05
_LATE = 4
_NEVER = float("inf")


class Heartbeat:
    """Keeps leases alive, and says so when one cannot be kept.

    A renewal has three outcomes. *Renewed*: the full ttl lies ahead again.
    *Lost*: the store says the lease is not ours any more. *Unsure*: the store
    did not answer; the renewal may have worked, so it is tried again, sooner,
    until the deadline passes, and only then is the lease lost. A beat that comes
    late, because the process got no time or a body held the GIL, asks first:
    nobody may have wanted the key, or somebody else may have kept the lease alive.

    The thread starts with the first lease of a process, and anew after a fork,
    because threads do not survive one. It sleeps until the next renewal is due
    and a short task that comes and goes in between does not wake it.
    """

    def __init__(self) -> None:
        self._start_afresh()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_afresh)

    def _start_afresh(self) -> None:
        self._leases: set[Lease] = set()
        self._in_flight: frozenset[Lease] = frozenset()
        self._changed = threading.Condition()
        self._wakes_at = _NEVER
        self._thread: threading.Thread | None = None
        self._keepalive = Keepalive(self.late)

    def watch(self, lease: "Lease") -> None:
        """Renew *lease* from now on."""
        with self._changed:
            self._leases.add(lease)
            self._wake_by(lease.next_renewal)
        if patched_by() is not None:
            self._keepalive.start(lease.ttl)

    def late(self) -> "list[Lease]":
        """Leases whose renewal is overdue by a fair part of their ttl."""
        # A copy, because this is asked from a native thread that no lock of ours can be shared with.
        leases, now = list(self._leases), clock()
        return [lease for lease in leases if now - lease.next_renewal > lease.ttl / _LATE]

    def forget(self, lease: "Lease") -> None:
        """Stop renewing *lease*; no renewal of it is under way when this returns."""
        with self._changed:
            self._leases.discard(lease)
            if lease in self._in_flight:
                self._changed.wait_for(lambda: lease not in self._in_flight, timeout=2 * _LONGEST_RENEWAL)

    def _wake_by(self, moment: float) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="singleton-lock-heartbeat", daemon=True)
            self._thread.start()
        if moment < self._wakes_at:
            self._wakes_at = moment
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            self._sleep()
            try:
                self._beat()
            except Exception:
                # Whatever it was, a process whose leases nobody renews is worse.
                logger.exception("lock.heartbeat stumbled and goes on")

    def _sleep(self) -> None:
        with self._changed:
            while (remaining := self._wakes_at - clock()) > 0:
                self._changed.wait(None if remaining == _NEVER else remaining)

    def _beat(self) -> None:
        try:
            self._tell_late()
            self._tell(self._take_overdue())
            lost: dict[Lease, str] = {}
            try:
                for store, leases in self._take_due().items():
                    lost.update(self._renew(store, leases))
            finally:
                self._put_down(lost)
            self._tell(lost)
        finally:
            self._plan()

    def _tell_late(self) -> None:
        with self._changed:
            late = clock() - self._wakes_at
            leases = [lease for lease in self._leases if late > lease.ttl / _LATE]
        for lease in leases:
            logger.warning(
                "lock.late key=%s late=%.1f ttl=%.1f: the heartbeat got no time to run; raise lock_ttl",
                lease.key,
                late,
                lease.ttl,
            )

    def _tell(self, lost: "dict[Lease, str]") -> None:
        for lease, reason in lost.items():
            try:
                lease.lose(reason)
            except Exception:
                logger.exception("lock.lost key=%s: whoever was told has failed", lease.key)

    def _take_overdue(self) -> "dict[Lease, str]":
        with self._changed:
            now = clock()
            overdue = {lease: "unreachable" for lease in self._leases if lease.is_unsure and lease.deadline <= now}
            self._leases.difference_update(overdue)
        return overdue

    def _take_due(self) -> "dict[Store, list[Lease]]":
        due: dict[Store, list[Lease]] = defaultdict(list)
        with self._changed:
            now = clock()
            for lease in self._leases:
                if lease.next_renewal <= now:
                    due[lease.store].append(lease)
            self._in_flight = frozenset(lease for leases in due.values() for lease in leases)
        return due

    def _put_down(self, lost: "dict[Lease, str]") -> None:
        with self._changed:
            # Who makes way keeps its lease until it has.
            self._leases.difference_update(lease for lease, reason in lost.items() if reason != "replaced")
            self._in_flight = frozenset()
            self._changed.notify_all()

    def _renew(self, store: Store, leases: "list[Lease]") -> "dict[Lease, str]":
        sent_at = clock()
        try:
            answers = store.renew([lease.claim for lease in leases], self._patience())
        except Exception as error:
            if not isinstance(error, StoreError):
                logger.exception("lock.unsure: the store %s is broken", store.address)
            for lease in leases:
                lease.unsure(error)
            return {}
        lost = {}
        for lease, answer in zip(leases, answers, strict=True):
            if answer in (Answer.DONE, Answer.REPLACED):
                lease.renewed(sent_at)
            if answer is Answer.REPLACED:
                lost[lease] = "replaced"
            elif answer is not Answer.DONE:
                lost[lease] = "taken" if answer is Answer.TAKEN else "expired"
        return lost

    def _patience(self) -> float:
        """How long a request may take, so that every loss is told when its deadline passes."""
        with self._changed:
            remaining = min((lease.deadline for lease in self._leases), default=_NEVER) - clock()
        return min(_LONGEST_RENEWAL, max(_SHORTEST_WAIT, remaining))

    def _plan(self) -> None:
        with self._changed:
            moments = [min(lease.next_renewal, lease.deadline) for lease in self._leases]
            self._wakes_at = min(moments, default=_NEVER)


heartbeat = Heartbeat()
