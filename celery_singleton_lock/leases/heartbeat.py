"""What renews every lease that a process holds."""

import logging
import os
import threading
from functools import partial

from celery_singleton_lock.leases.greenlets import patched_by
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.pulse import Pulse
from celery_singleton_lock.leases.renewal import Renewal
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

    Each store has a thread of its own, so one that does not answer costs the
    leases of the others nothing. It starts with the first lease, and again after
    a fork, because threads do not survive one.

    A signal may raise anywhere in `watch` and `forget`, so all that they share
    with those threads is locked by C code alone, and they wait on no condition.
    """

    def __init__(self) -> None:
        self._start_over()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        self._lock = threading.RLock()
        self._pulses: dict[Store, Pulse] = {}
        self._keepalive = Keepalive(self.late)

    def watch(self, renewal: Renewal) -> None:
        """Renew it from now on, for as long as somebody else has it."""
        with self._lock:
            self._pulse_of(renewal.store).watch(renewal)
        if patched_by() is not None:
            self._keepalive.start(renewal.store, renewal.ttl)

    def forget(self, renewal: Renewal) -> None:
        """Stop renewing it; no renewal of it is under way when this returns."""
        pulse = self._pulses.get(renewal.store)
        if pulse is not None:
            pulse.forget(renewal)

    def watched(self) -> list[Renewal]:
        """What is renewed."""
        return [renewal for pulse in list(self._pulses.values()) for renewal in pulse.watched()]

    def late(self) -> list[Renewal]:
        """What is overdue by a fair part of its ttl."""
        now = clock()
        return [renewal for renewal in self.watched() if renewal.suffers(now - renewal.next_renewal)]

    def _pulse_of(self, store: Store) -> Pulse:
        if store not in self._pulses:
            self._pulses[store] = Pulse(self._lock, ended=partial(self._drop, store))
            store.on_reconnect = self._pulses[store].renew_all
            store.on_clock_step = partial(_tell_step, store.address)
        return self._pulses[store]

    def _drop(self, store: Store, pulse: Pulse) -> None:
        if self._pulses.get(store) is pulse:
            del self._pulses[store]


def _tell_step(address: str, seconds: float) -> None:
    event = (
        "lock.clock store=%s step=%+.1f: its clock was set by so many seconds, or that of its new master differs; "
        "leases have ended early, or last longer"
    )
    scribe.tell(partial(logger.warning, event, address, seconds))


heartbeat = Heartbeat()
