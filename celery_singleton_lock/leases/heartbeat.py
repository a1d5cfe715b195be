"""The renewal of every lease that a process holds."""

import atexit
import logging
import os
import threading
from collections.abc import Hashable
from contextlib import suppress
from functools import partial

from celery_singleton_lock.leases.greenlets import patched_by
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.pulse import Pulse
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.leases.tally import Tally, What
from celery_singleton_lock.leases.teller import scribe
from celery_singleton_lock.stores.base import Store, clock

logger = logging.getLogger("celery_singleton_lock")


class Heartbeat:
    """Keeps leases alive, and says so when one cannot be kept.

    A renewal has three outcomes. *Renewed*: the full ttl lies ahead again.
    *Lost*: the store says the lease is not ours any more. *Unsure*: the store
    did not answer; the renewal may have worked, so it is tried again, sooner,
    until the deadline passes, and only then is the lease lost. A beat that comes
    late, because the process got no time or a body held the GIL, asks first:
    nobody may have wanted the key, or somebody else may have kept the lease alive.

    Each store has a thread of its own. If a store has parts, each part has one. So a
    part that does not answer costs the leases of the others nothing. A thread starts
    with the first lease, and again after a fork, because threads do not survive a fork.

    That thread also hands over what was counted (`tally`), and starts for that as well.

    A signal may raise anywhere in `watch` and `forget`, so all that they share
    with those threads is locked by C code alone, and they wait on no condition.
    """

    def __init__(self) -> None:
        self._start_over()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        self._lock = threading.RLock()
        self._pulses: dict[Hashable, Pulse] = {}
        self._keepalive = Keepalive(self.late)
        self.tally: Tally = Tally(self._attend)

    def watch(self, renewal: Renewal) -> None:
        """Renew it from now on, for as long as something else refers to it."""
        with self._lock:
            self._join(renewal)
        if patched_by() is not None:
            self._keepalive.start(renewal.store, renewal.ttl)

    def forget(self, renewal: Renewal) -> None:
        """Stop renewing it; no renewal of it is under way when this returns."""
        while (pulse := self._pulses.get(renewal.part)) is not None:
            pulse.forget(renewal)
            if self._pulses.get(renewal.part) in (pulse, None):
                break

    def watched(self) -> list[Renewal]:
        """The leases that are renewed."""
        return [renewal for pulse in list(self._pulses.values()) for renewal in pulse.watched()]

    def late(self) -> list[Renewal]:
        """The leases whose renewal is overdue by a fair part of their ttl."""
        now = clock()
        return [renewal for renewal in self.watched() if renewal.suffers(now - renewal.next_renewal)]

    def _join(self, renewal: Renewal) -> None:
        store = renewal.store
        renewal.part = store.part_of(renewal.key) if store.has_parts else store
        self._pulse_of(store, renewal.part).watch(renewal)

    def _pulse_of(self, store: Store, part: Hashable = None) -> Pulse:
        part = part or store
        if part not in self._pulses:
            sort = partial(self._sort, part) if store.has_parts else None
            self._pulses[part] = Pulse(store, self._lock, partial(self._drop, part), self.tally, sort)
            store.on_reconnect = partial(self._renew_all, store)
            store.on_clock_step = partial(_tell_step, store.address)
        return self._pulses[part]

    def _sort(self, part: Hashable, pulse: Pulse) -> None:
        """Move each lease to the pulse of the part of the store that has its key now."""
        for renewal in pulse.watched():
            if pulse.store.part_of(renewal.key) is not part:
                with self._lock:
                    if pulse.let_go(renewal):
                        self._join(renewal)

    def _renew_all(self, store: Store) -> None:
        for pulse in list(self._pulses.values()):
            if pulse.store is store:
                pulse.renew_all()

    def _attend(self, store: Store) -> None:
        # At the end of the interpreter no thread can start any more; what is left is handed over without one.
        with suppress(RuntimeError), self._lock:
            self._pulse_of(store).attend()

    def _drop(self, part: Hashable, pulse: Pulse) -> None:
        if self._pulses.get(part) is pulse:
            del self._pulses[part]


def _tell_step(address: str, seconds: float) -> None:
    event = (
        "lock.clock store=%s step=%+.1f: its clock was set by so many seconds, or that of its new master differs; "
        "leases have ended early, or last longer"
    )
    scribe.tell(partial(logger.warning, event, address, seconds))


heartbeat = Heartbeat()


def count(store: Store, key: str, what: What, task: str, label: str = "", value: float = 0.0) -> None:
    """Count something that has happened in this process, see `Tally.add`."""
    heartbeat.tally.add(store, key, what, task, label, value)


def count_grant(store: Store, key: str, task: str, *, waited: float, took_over: bool) -> None:
    """Count a lease that was granted."""
    heartbeat.tally.add(store, key, "acquired", task, value=waited)
    if took_over:
        heartbeat.tally.add(store, key, "taken_over", task)


def hand_over_counts() -> None:
    """Hand over what was counted, because the process is about to end."""
    heartbeat.tally.flush_all()


# billiard ends its pool processes without these calls, so `handlers` makes the call there.
atexit.register(hand_over_counts)
