"""The work of the main process of a worker for a pool child that cannot do it.

The token of a run is made here and travels with the request. So the main
process can release the lease of a child that was killed, and renew the lease of
one whose body lets no other thread run.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, WorkerLostError
from celery.exceptions import Ignore, Reject, Retry
from celery.worker import state
from celery.worker.request import Request

from celery_singleton_lock.errors import LockHeld, SingletonLockError, StoreError
from celery_singleton_lock.leases.greenlets import patched_by
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.lease import new_token
from celery_singleton_lock.leases.leftovers import Unreleased, leftovers
from celery_singleton_lock.leases.processes import is_dead, is_stopped
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.publish import for_a_dead_run
from celery_singleton_lock.runs import message
from celery_singleton_lock.runs.ids import text_of
from celery_singleton_lock.runs.marks import LateMarker, unmark_later
from celery_singleton_lock.runs.message import Delivery
from celery_singleton_lock.runs.results import end_of, store_end
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Claim, Facts

# A child renews every third of a ttl; one that has not done so for longer needs help.
_LATE = 2.5
_MOST_REMEMBERED = 200


class SingletonRequest(Request):
    """A request for a `SingletonTask`, in the main process.

    Attributes:
        acknowledged_at: When its acknowledgement was written to the broker; infinite before.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Celery makes a subclass for each task, with an `on_success` of its own, which it calls for each end."""
        super().__init_subclass__(**kwargs)
        cls.on_success = _ending(cls.on_success)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._claim: Claim | None = None
        self._has_run = True
        self._has_ended = False
        self._is_cut_off = False
        self._began = float("inf")
        self.acknowledged_at = float("inf")
        sends_events = bool(self.eventer and self.eventer.enabled and self.task.send_events)
        has_twin = bool((self.delivery_info or {}).get("redelivered") and self._has_a_twin())
        self._tell(Delivery(new_token(), clock(), sends_events, self.content_type, has_twin))
        known.add(self)

    def _tell(self, delivery: Delivery) -> None:
        self._delivery = delivery
        # As a plain tuple, because otherwise the name of our class would travel with each message.
        self.request_dict[message.DELIVERY] = tuple(delivery)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Keep the child's lease alive from now on, if it runs in a process of its own."""
        # Celery's `time_start` is on the wall clock, which may be set.
        self._began = clock() - (time.monotonic() - time_accepted)
        super().on_accepted(pid, time_accepted)
        if self._runs_in_a_child():
            with suppress(SingletonLockError):
                keepalive.start(store_of(self.task.app), self.task.lock_options.ttl)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Release for a child that is dead: nothing in it ran to its end."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            # The error is wrapped until it has gone through a pipe, and only a prefork pool has one.
            error = error.exc
        self._has_run = not _is_turned_away(error)
        if isinstance(error, WorkerLostError | Terminated):
            self._release_once_dead(comes_again=self._comes_again())
        # Celery may publish a retry for it here.
        with for_a_dead_run():
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Release at the hard limit, though not yet: the child still runs when this is called."""
        super().on_timeout(soft, timeout)
        if not soft:
            task = self.task
            # Celery 5.7 has an option for timeouts alone, which follows the older option if it is not set.
            is_acknowledged = getattr(task, "acks_on_timeout", task.acks_on_failure_or_timeout)
            self._release_once_dead(comes_again=task.acks_late and not is_acknowledged)

    @property
    def _on_ack(self) -> Callable[..., Any]:
        """What Celery's `acknowledge` calls; a class of the user's may have rejected the message before."""
        return self._sends_acknowledgement

    @_on_ack.setter
    def _on_ack(self, acknowledge_later: Callable[..., Any]) -> None:
        self._acknowledge_later = acknowledge_later

    def _sends_acknowledgement(self, *args: Any) -> Any:
        """Let the next delivery be dropped if this acknowledgement fails, or is lost with the connection."""
        if self.task.acks_late:
            self.end()
        # Celery leaves it to the event loop, later, and tells nobody of a failure.
        self.message.ack = partial(self._acknowledge, self.message.ack)
        if self._runs_in_the_event_loop():
            self._acknowledge_at_once(*args)
        # What Celery does beside it (it widens its prefetch again after a lost connection) is due in any case.
        return self._acknowledge_later(*args)

    def _acknowledge_at_once(self, *args: Any) -> None:
        """In a solo pool the bodies of all due messages would run first, and the broker may not wait for so long."""
        # If it fails for a reason other than the connection, Celery does it later after all.
        with suppress(Exception):
            self.message.ack_log_error(*args)
            self.message.ack = _do_nothing

    def _acknowledge(self, acknowledge: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.acknowledged_at = clock()
        acknowledged.append(self)
        # This attribute of the message refers to the request, so both would wait for the garbage collector.
        del self.message.ack
        try:
            return acknowledge(*args, **kwargs)
        except Exception:
            self.cut_off()
            raise

    def cut_off(self) -> None:
        """The broker does not hear of the end of this delivery, so another delivery will come."""
        self._is_cut_off = True
        # If this delivery has not begun yet, the other one may run before it.
        self._tell(self._delivery._replace(received=float("-inf")))
        if self._has_ended:
            self._leave_marker()

    def end(self) -> None:
        """This delivery has ended, except for its acknowledgement."""
        self._has_ended = True
        if self._is_cut_off:
            self._leave_marker()

    def _has_a_twin(self) -> bool:
        """An earlier delivery of the message runs in this worker."""
        return any(request.id == self.id for request in _active_requests())

    def _leave_marker(self) -> None:
        """Let the next delivery of the message be dropped, because its run has ended."""
        claim, attempt = self.claim, self.request_dict.get("retries") or 0
        if self._has_run and claim is not None:
            with suppress(SingletonLockError):
                leftovers.add(LateMarker(store_of(self.app), claim, attempt, message.kept(self.task)))

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """A call that never runs, because it is revoked or expired, leaves no mark."""
        super()._announce_revoked(reason, terminated, signum, expired)
        self._unmark()

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        """Keep the end of a call whose worker shuts down: Celery overwrites an end that it has not read with RETRY."""
        kept = end_of(self.task, self.id)
        super()._announce_cancelled(*args, **kwargs)
        if kept is not None:
            store_end(self.task, self.id, self._context, kept)

    @property
    def claim(self) -> Claim | None:
        """The child's claim as far as the main process can know it; None if it cannot."""
        if self._claim is None:
            try:
                self._claim = self._as_the_child_makes_it()
            except Exception:  # noqa: BLE001 (whatever the message carries; the child finds the same, and tells)
                return None
        return self._claim

    def _as_the_child_makes_it(self) -> Claim | None:
        if not self.task.is_lockable():
            return None
        notes = message.Notes.of(self.request_dict, self.id)
        key = self.task.lock_key_in(notes) or self.task.lock_key_without_user_code(self.args, self.kwargs)
        if key is None:
            return None
        options = self.task.lock_options
        token, marker = self._delivery.token, message.marker_of(key, self.id, notes)
        return Claim(key, token, options.ttl, options.limit, Facts(task_id=text_of(self.id)), marker=marker)

    def _runs_in_a_child(self) -> bool:
        return self.worker_pid not in (None, os.getpid())

    def _runs_in_the_event_loop(self) -> bool:
        if self.worker_pid != os.getpid():
            return False
        return threading.current_thread() is threading.main_thread() and patched_by() is None

    def needs_help(self) -> bool:
        """The child runs for longer than its own heartbeat needs until it renews its lease."""
        options = self.task.lock_options
        return (
            self._runs_in_a_child()
            and clock() - self._began > options.ttl / _LATE
            # It has asked to be killed if it cannot renew by itself.
            and options.on_lost != "kill"
            # A dead child needs no help, and a stopped one may stay stopped for ever.
            and not is_dead(self.worker_pid)
            and not is_stopped(self.worker_pid)
        )

    def _release_once_dead(self, *, comes_again: bool) -> None:
        pid, claim = self.worker_pid, self.claim
        if not self._runs_in_a_child() or claim is None:
            return
        with suppress(SingletonLockError):
            left = Unreleased(store_of(self.app), claim)
            # It may have died while it asked.
            leftovers.add(left, may_release=lambda: is_dead(pid), may_arrive=True)
        if not comes_again:
            self._unmark()

    def _comes_again(self) -> bool:
        """Celery delivers or publishes the message of a dead child again."""
        task, retries = self.task, self.request_dict.get("retries") or 0
        is_rejected = task.acks_late and task.reject_on_worker_lost
        has_retries = task.max_retries is None or retries < task.max_retries
        return bool(is_rejected or (getattr(task, "retry_on_worker_lost", False) and has_retries))

    def _unmark(self) -> None:
        """End in the background what the call has left in the store."""
        if self.claim is not None:
            with suppress(SingletonLockError):
                unmark_later(store_of(self.app), self.claim.key, self.claim.facts.task_id, returns=True)


def _do_nothing(*_: Any, **__: Any) -> None:
    """The message is acknowledged already."""


def _ending(on_success: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(on_success)
    def on_end(request: SingletonRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return on_success(request, *args, **kwargs)
        finally:
            # A message with a late acknowledgement may be rejected, and come again.
            if not request.task.acks_late:
                request.end()

    return on_end


def _is_turned_away(error: BaseException) -> bool:
    """The delivery has ended without a body: it goes on by another message, or was dropped."""
    if isinstance(error, Retry):
        return isinstance(error.exc, LockHeld | StoreError)
    return isinstance(error, Ignore | Reject)


def _late_renewals() -> list[Renewal]:
    """The renewals that pool children may have missed."""
    late = []
    for request in _active_requests():
        # A request with wrong settings, for example, costs the others nothing; its child tells of it.
        with suppress(Exception):
            if isinstance(request, SingletonRequest) and request.needs_help() and request.claim is not None:
                late.append(Renewal(store_of(request.app), request.claim))
    return late


def _active_requests() -> list[Any]:
    while True:
        try:
            return list(state.active_requests)
        except RuntimeError:
            # The main thread has added one meanwhile.
            continue


known: WeakSet[SingletonRequest] = WeakSet()
# This list keeps the requests alive for as long as they matter.
acknowledged: deque[SingletonRequest] = deque(maxlen=_MOST_REMEMBERED)
keepalive = Keepalive(_late_renewals)
