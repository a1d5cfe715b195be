"""One execution of a task.

docs/explanation/how-it-works.md draws its phases.
"""

import os
import socket
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from traceback import format_exception
from typing import Any
from weakref import proxy

from billiard import current_process
from celery import Task, states
from celery._state import _task_stack
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from kombu.exceptions import OperationalError

from celery_singleton_lock.definition.keys import label_of
from celery_singleton_lock.definition.options import LockOptions, no_process_for
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.errors import REASONS_TO_STOP, LockLost, StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.leases.counters import count
from celery_singleton_lock.leases.holding import Holding
from celery_singleton_lock.leases.interrupt import DeadMan, Interrupt
from celery_singleton_lock.log import log
from celery_singleton_lock.runs import endings, message
from celery_singleton_lock.runs.endings import CallRevoked, Ended, Reason, Revoked, store_revoked, unmark
from celery_singleton_lock.runs.message import DELIVERY, Notes, RequestState, delivery_of, text_of, way_of
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, new_token
from celery_singleton_lock.stores.redis.store import Store


class Phase(IntEnum):
    ASKING = 0
    RUNNING = 1
    UNLOCKED = 2  # the body runs without a lease
    ENDED = 3  # the body has ended, and its result may not be stored yet
    OVER = 4


# Before Python 3.12, `Phase.ASKING` costs a function call.
ASKING, RUNNING, UNLOCKED, ENDED, OVER = Phase
_LEADS_TO = (
    (RUNNING, UNLOCKED, OVER),
    (ENDED, OVER),
    (ENDED, OVER),
    (OVER,),
    (),
)


def claim_of(options: LockOptions, notes: Notes, key: str, token: str, task_id: str, attempt: int) -> Claim:
    """The claim without what `Policy.complete` adds. A main process calls this, so it runs no user code."""
    claim = Claim(key, token, options.ttl, options.limit)
    claim.task_id = task_id
    claim.task_name = options.holder_name
    # Without its attempt, a retry would be taken for a copy of the run before it.
    claim.attempt = attempt
    claim.published = notes.first_published
    # A task id may be reused, so the time of publication identifies the message.
    claim.message = 0 if notes.is_bare else notes.published
    claim.refused_at = notes.refused_at
    return claim


def is_later_attempt(request: Context, notes: Notes) -> bool:
    """Whether a body has published the call by `retry()` or `replace()`. That body may still run."""
    return bool(
        request.retries
        # Later steps of a chain have `replaced_task_nesting`, too, but their `parent_id` is another task's.
        or (request.replaced_task_nesting and request.parent_id in (None, request.id))
        or (notes.origin and notes.origin.had_lease)
    )


class Run(RequestState):
    retry_error: BaseException | None = None  # the `exc` of `retry()`
    stored_retry: str | None = None  # the lock key of the next attempt, once RETRY is stored
    was_passed_on = False

    def __init__(self, task: Task, request: Context, notes: Notes, key: str, args: Any, kwargs: Any) -> None:
        self.phase = ASKING
        self.request_id = request.id
        self.task = task
        self.request = request
        self.notes = notes
        self.key = key
        self.args = args
        self.kwargs = kwargs
        self.options = options = task.lock_options
        self.delivery = delivery_of(request)
        self._made_at = clock()
        self.way = way = way_of(task, request, notes, self.delivery)
        self.can_be_requeued = way in ("first", "copy")
        self.is_later_attempt = is_later_attempt(request, notes)
        # The app may move to another store while this run holds its lock.
        self.store: Store = store_of(task.app)
        task_id = request.id if type(request.id) is str else text_of(request.id or "")
        token = self.delivery.token or new_token()
        self.claim = claim = claim_of(options, notes, key, token, task_id, request.retries or 0)
        claim.hostname = request.hostname or socket.gethostname()
        claim.pid = os.getpid()
        if options.label is not None:
            claim.label = label_of(task, key, task_id, args, kwargs)
        claim.keeps_result = not (request.ignore_result or (way == "eager" and not task.store_eager_result))
        if way == "item":
            self.map = request.singleton_state.map
            claim.task_id = text_of(self.map.request.id)
            claim.task_name = self.map.name
        if options.min_hold and not options.unique_in_queue:
            # In a queue mode `lock_min_hold` counts from the publication.
            claim.min_hold = options.min_hold
        claim.may_be_copy = way == "copy" or (self.is_later_attempt and way != "broadcast")
        self.task_id: str = claim.task_id
        self.interrupt = Interrupt()
        on_lost = self.interrupt.on_lost if options.on_lost != "warn" else None
        self.lease = Holding(self.store, claim, on_lost, self._deadman() if options.kills else None, task)

    @property
    def run(self) -> "Run":
        return self

    def go_to(self, phase: Phase) -> None:
        if phase not in _LEADS_TO[self.phase]:
            raise RuntimeError(f"a run of {self.key} cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase
        if phase is OVER:
            # A strong reference would keep run and request alive until the garbage collector runs.
            self.request = proxy(self.request)

    def _deadman(self) -> DeadMan:
        # Only the children of a prefork pool are daemons.
        if not current_process().daemon:
            raise no_process_for(self.task.name)
        return DeadMan()

    @property
    def was_replaced(self) -> bool:
        return self.interrupt.delivered and self.lease.lost_reason in REASONS_TO_STOP

    @property
    def age(self) -> float:
        return clock() - self._made_at

    def store_retry(self, why: BaseException | None, key: str, *, may_be_over: bool = False) -> None:
        """Store RETRY before the message leaves. Otherwise Celery could store it over the end of the next attempt.

        Store nothing if the call *may_be_over*: another delivery may have stored the end.
        """
        mark_as_retry = message.stores_retry_once(self.task.backend.__class__)
        # With `ignore_result` and `store_errors_even_if_ignored`, no success is stored. So the RETRY of a requeue
        # (`ASKING`) would stay for ever.
        keeps_errors = self.task.store_errors_even_if_ignored and self.phase is not ASKING
        if not may_be_over and (keeps_errors or not self._is_ignored):
            traceback = "".join(format_exception(why)) if why is not None and why is self.retry_error else None
            self._store(partial(mark_as_retry, self.task.backend, self.request.id, why, traceback))
        self.stored_retry = key

    def _store_started(self) -> None:
        if self.way not in ("item", "eager") and not self._is_ignored:
            about = {"pid": os.getpid(), "hostname": self.request.hostname}
            store = partial(self.task.backend.store_result, self.request.id, about, states.STARTED)
            # If `_store` caught this error, the body would run without its soft time limit.
            self._store(store, raises=(SoftTimeLimitExceeded,))

    @property
    def _is_ignored(self) -> bool:
        return bool(self.task.ignore_result or self.request.ignore_result)

    def _store(self, store: Callable[..., Any], raises: tuple[type[Exception], ...] = ()) -> None:
        try:
            store(request=self.request)
        except raises:
            raise
        except Exception as error:  # noqa: BLE001 (whatever a backend raises)
            log.warning("lock.result_failed", "%s", error, key=self.key, task_id=self.task_id)

    def revoked(self, text: str, reason: Reason, holder: str | None) -> Ended:
        """The end as REVOKED. An item or a chord's member returns None: its map or chord body waits for a result."""
        is_part = self.way == "item" or self.request.chord
        return Ended() if is_part else Ended(error=Revoked(CallRevoked(text, self.key, holder, reason)))

    def store_revoked(self, error: CallRevoked) -> None:
        """Call this only once the run holds nothing: a caller may publish the next call at once."""
        store_revoked(self.task, error)
        # Celery sends no event here, so a monitor would show the run as running for ever.
        self.send_event("task-revoked", terminated=False, signum=None, expired=False)

    def send_event(self, event: str, **facts: Any) -> None:
        if not self.delivery.sends_events:
            return
        try:
            self.task.send_event(event, **facts)
        except OperationalError as error:
            log.warning("lock.event_failed", "%s", error, key=self.key, task_id=self.task_id)

    def check_not_replaced(self) -> None:
        if self.was_replaced:
            raise LockLost(self.key, self.lease.lost_reason or "replaced")

    def __enter__(self) -> None:
        if self.way == "item":
            # While the map is the current task, each task that a body calls directly counts as an item of the map.
            _task_stack.push(self.task)
            self.task.request_stack.push(self.request)

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if self.way == "item":
            self.task.request_stack.pop()
            _task_stack.pop()
        if self.options.min_hold and not self.options.min_hold_on_failure and self._has_failed(error):
            self.claim.min_hold = 0.0
            # In a queue mode, the cool-down is a mark.
            if self.options.unique_in_queue:
                unmark(self.store, self.key, self.task_id)
        self.give_back()
        self.go_to(OVER if self.lease.ending is None else ENDED)

    def _has_failed(self, error: BaseException | None) -> bool:
        if self.phase is ASKING or (self.stored_retry is not None and not self.was_replaced):
            return False
        if isinstance(error, Ignore | Reject | Retry):
            return isinstance(error, Revoked)
        return error is not None or self.lease.lost_reason is not None

    def give_back(self) -> None:
        if self.lease.unreleased:
            self.lease.give_back()
        if not (self.lease.fence or self.was_passed_on):
            self.unmark()

    def finish(self, *, is_interrupted: bool = False) -> None:
        """Clean up once the result is stored. If Celery *is_interrupted*, the result may be missing."""
        if self.phase is not OVER:
            self.give_back()
            self._mark_stored(is_interrupted=is_interrupted)
            self.go_to(OVER)

    def _has_stored(self) -> bool:
        if self.request.ignore_result or endings.why_unreadable(self.task):
            return True
        return endings.final_result(self.task, self.request.id, self.notes.first_published) is not None

    def _mark_stored(self, *, is_interrupted: bool) -> None:
        ending = self.lease.ending
        if ending is None or ending.outcome != "ended" or (is_interrupted and not self._has_stored()):
            return
        self.lease.ending = None
        claim = self.claim
        mark = partial(self.store.mark_done, self.key, claim.marker, claim.attempt, "stored", ending.kept)
        if self.lease.marker == "left":
            try:
                mark()
                return
            except StoreError as error:
                text = "until the marker is written in the background, a copy of this message may run: %s"
                log.warning("lock.done_marker_failed", text, error, key=self.key, task_id=self.task_id)
        background.submit(PendingRelease(partial(self.store.servers.part_of, self.key), clock() + ending.kept, mark))

    def unmark(self) -> None:
        """End the marks of a call whose message will not come again."""
        if self.notes.left_something:
            unmark(self.store, self.key, self.task_id, may_arrive=self.lease.is_unanswered)
            self.notes = self.notes.of_the_call()

    def begins(self, phase: Phase) -> None:
        self.go_to(phase)
        if self.task.stores_started:
            self._store_started()
        if phase is UNLOCKED:
            count(self.store, self.key, "unlocked", self.task.name)
        headers = self.request.headers
        if type(headers) is dict:
            # A body may hand its headers on, and then another call would have this delivery's token.
            headers.pop(DELIVERY, None)
        if not self.notes.published:
            self.notes = self.notes.dated(partial(self.store.time, self.key))
            self.notes.task_id = text_of(self.request.id or "")
