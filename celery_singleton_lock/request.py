"""What the main process of a worker does for a pool child that cannot do it.

The token of a run is made here and travels with the request. So the main
process can release the lease of a child that was killed, and renew the lease of
one whose body lets no other thread run.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from billiard.exceptions import Terminated, WorkerLostError
from celery.worker import state
from celery.worker.request import Request

from celery_singleton_lock.conflict import EVENTS_HEADER
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.leases.leftovers import leftovers
from celery_singleton_lock.publish import KEY_HEADER, Withdrawal
from celery_singleton_lock.task import TOKEN_HEADER

_DEAD = ("", "Z", "X")
_STOPPED = ("T", "t")
# A child renews every third of a ttl; whoever has not done so for longer needs help.
_LATE = 2.5


class SingletonRequest(Request):
    """A request for a `SingletonTask`, in the main process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_dict[TOKEN_HEADER] = new_token()
        self.request_dict[EVENTS_HEADER] = bool(self.eventer and self.eventer.enabled and self.task.send_events)
        self._lock_lease: Lease | None = None

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Keep the child's lease alive from now on, if it runs in a process of its own."""
        super().on_accepted(pid, time_accepted)
        if self._runs_in_a_child():
            with suppress(SingletonLockError):
                keepalive.start(self.task.lock_options.ttl)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Release for a child that is dead: nothing in it ran to its end."""
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if isinstance(error, WorkerLostError | Terminated):
            self._release_once_dead()
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Release at the hard limit, though not yet: the child still runs when this is called."""
        super().on_timeout(soft, timeout)
        if not soft:
            self._release_once_dead()

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Who will never run, because it is revoked or expired, is neither queued nor next."""
        super()._announce_revoked(reason, terminated, signum, expired)
        lease = self.lock_lease
        if lease is not None:
            leftovers.add(Withdrawal(lease.store, lease.key, self.id, lease.ttl))

    @property
    def lock_lease(self) -> Lease | None:
        """The child's lease as far as the main process can know it; None for a call that has no key."""
        if self._lock_lease is None:
            self._lock_lease = self._as_the_child_makes_it()
        return self._lock_lease

    def _as_the_child_makes_it(self) -> Lease | None:
        if not self.task.is_lockable():
            return None
        try:
            lease: Lease = self.task.lease_for(
                self.args, self.kwargs, key=self.request_dict.get(KEY_HEADER), token=self.request_dict[TOKEN_HEADER]
            )
        except (SingletonLockError, TypeError):
            # The child finds the same, and tells: that is its task's result.
            return None
        return lease

    def _runs_in_a_child(self) -> bool:
        return self.worker_pid not in (None, os.getpid())

    def needs_help(self) -> bool:
        """The child runs, for longer than its own heartbeat takes to renew its lease."""
        options = self.task.lock_options
        return (
            self._runs_in_a_child()
            and time.time() - self.time_start > options.ttl / _LATE
            # It has asked to be killed if it cannot renew by itself.
            and options.on_lost != "kill"
            # Nor one that is stopped: it may stay so for ever.
            and _state_of(self.worker_pid) not in (*_DEAD, *_STOPPED)
        )

    def _release_once_dead(self) -> None:
        pid = self.worker_pid
        if self._runs_in_a_child() and self.lock_lease is not None:
            leftovers.add(self.lock_lease, may_release=lambda: _state_of(pid) in _DEAD)


def _late_leases() -> list[Lease]:
    """Those that children may not have renewed by themselves."""
    running = [request for request in _active_requests() if isinstance(request, SingletonRequest)]
    return [request.lock_lease for request in running if request.lock_lease is not None and request.needs_help()]


def _active_requests() -> list[Any]:
    while True:
        try:
            return list(state.active_requests)
        except RuntimeError:
            # The main thread has added one meanwhile.
            continue


def _state_of(pid: int) -> str:
    """The letter that the kernel has for the state of the process; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "" if Path("/proc/self").exists() else _state_without_proc(pid)
    return stat.rpartition(")")[2].split()[0]


def _state_without_proc(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    return "R"


keepalive = Keepalive(_late_leases)
