"""One execution of a task: its claim, its lease, and its end."""

import logging
import os
import random
import signal
import socket
from functools import partial
from traceback import format_exception
from typing import Any, NoReturn
from weakref import ref

from billiard import current_process
from celery import Task
from celery.app import task as celery_task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError

from celery_singleton_lock import signals
from celery_singleton_lock.errors import MAKES_WAY, ConfigurationError, LockHeld, LockLost
from celery_singleton_lock.keys import label_of
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.counters import count
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.leases.interrupt import Interrupt
from celery_singleton_lock.leases.lease import Lease, new_token
from celery_singleton_lock.options import LockOptions
from celery_singleton_lock.runs import delivery, message
from celery_singleton_lock.runs.endings import CallRevoked, Reason, Revoked, revoke
from celery_singleton_lock.runs.message import unmark
from celery_singleton_lock.runs.notes import DELIVERY, Notes, message_of, text_of
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Answer, Claim, Ending, Facts, Holder
from celery_singleton_lock.stores.redis.store import Store

logger = logging.getLogger("celery_singleton_lock")

# Celery reads it when it stores RETRY, from 5.7 on.
_HEEDS_REQUEST = hasattr(celery_task, "get_actual_ignore_result")
# The outcomes after which a call comes again to ask once more.
_POLLS = ("rescheduled", "joined")


class Run:
    """One execution of a task whose key it has to hold.

    It has what every run needs, and the defaults of its class for everything else.
    """

    # The first run of a call, by its first delivery, in time.
    is_usual = True
    # An item of `map`, `starmap` or `chunks`, so another task's message brought it.
    is_item = False
    is_broadcast = False
    # Its message may have been delivered before.
    is_copy = False
    # It continues an earlier run, as its next attempt or by a `replace()`.
    hands_over = False
    # Its message can go back to the broker.
    can_come_again = True
    # It has begun to ask for its lock, and has not ended.
    is_under_way = False
    # Its body runs, or has run.
    has_begun = False
    # Its body runs without a lock of its own.
    is_unlocked = False
    # It has ended, and nothing of it is left in this process or in the store.
    is_over = False
    # The `Ignore`, `Reject` or `Retry` that it has ended with.
    ended_with: BaseException | None = None
    # A run before it, of the same delivery, that has left a marker.
    before: "Run | None" = None
    # The key of the retry that its body has published, and the error for which the body wants to come again.
    retry_key: str | None = None
    retries_because_of: BaseException | None = None
    # For later deliveries of its message, once its body has ended; and whether they will find it in the store.
    ending: Ending | None = None
    has_marker = False
    # Of the task that has its task id, if that is a map.
    _holder_name = ""
    # Another message, or delivery, goes on with its call.
    _goes_on = False
    _retry_is_stored = False

    def __init__(self, task: Task, request: Context, notes: Notes, key: str, args: Any, kwargs: Any) -> None:
        self.task, self.request, self.notes, self.key, self.args, self.kwargs = task, request, notes, key, args, kwargs
        self.options: LockOptions = task.lock_options
        self.delivery = delivery.delivery_of(request)
        self._made_at = clock()
        self.task_id = request.id if type(request.id) is str else text_of(request.id or "")
        if delivery.is_unusual(request, notes, self.delivery, self.options):
            self._look_at_message()
        self.interrupt = Interrupt()
        self.lease = Lease(
            store_of(task.app),
            self._claim(),
            deadman=self._deadman() if self.options.on_lost == "kill" else None,
            on_lost=partial(_lost, ref(self)),
            refused_at=notes.since,
        )

    def _look_at_message(self) -> None:
        """Find out what is unusual about its delivery."""
        task, request, notes = self.task, self.request, self.notes
        self.is_usual = False
        state = delivery.state_of(request)
        if state is not None and state.item_of:
            self.is_item, self.task_id = True, text_of(state.item_of)
            self._holder_name = state.map_name
        self.is_broadcast = delivery.is_broadcast(task, request)
        self.is_copy = not self.is_item and delivery.may_be_copy(task, request, notes)
        self.hands_over = delivery.hands_over(request) or bool(notes.continues)
        self.can_come_again = not (request.is_eager or self.is_item or self.is_broadcast)

    def _deadman(self) -> DeadMan | None:
        # The children of a prefork pool are daemons, and nothing else is.
        return DeadMan() if kills_itself(self.task, self.options, has_process=current_process().daemon) else None

    def _claim(self) -> Claim:
        options, request, task, notes = self.options, self.request, self.task, self.notes
        claim = Claim(
            self.key,
            self.delivery.token or new_token(),
            options.ttl,
            options.limit,
            Facts(
                self.task_id,
                self._holder_name or options.holder_name,
                request.hostname or socket.gethostname(),
                os.getpid(),
                request.retries or 0,
                self.published,
                label_of(task, self.key, self.task_id, self.args, self.kwargs) if options.label is not None else "",
            ),
            message=message_of(notes),
        )
        if options.min_hold and not options.unique_in_queue:
            # In a queue mode `lock_min_hold` counts from the publication, so it does not count here.
            claim.min_hold = options.min_hold
        if self.is_copy or (self.hands_over and not self.is_broadcast):
            claim.may_be_copy = True
        if notes.asked:
            claim.asked = True
        if notes.marked:
            claim.queued_for = options.queue_ttl
            if options.on_conflict != "wait":
                # What waits in its place was taken from its queue in time.
                claim.queued_for = min(options.queue_ttl, message.until_expired(task, request.expires))
        return claim

    @property
    def store(self) -> Store:
        """The store of its lock, even if the app has moved to another store meanwhile."""
        return self.lease.store

    @property
    def claim(self) -> Claim:
        return self.lease.claim

    @property
    def published(self) -> int:
        """When its call was published, in microseconds; what replaces a run is no newer than the run."""
        return self.notes.continues_from or self.notes.published

    @property
    def was_replaced(self) -> bool:
        """It has been asked to make way, for its successor or by a person."""
        return self.interrupt.delivered and self.lease.lost_reason in MAKES_WAY

    @property
    def age(self) -> float:
        return clock() - self._made_at

    def on_lost(self, lease: Lease) -> None:
        """End the body, or let it run on, as the task's `lock_on_lost` says; then have `lock_lost` sent."""
        policy, reason = self.options.on_lost, lease.lost_reason or "expired"
        count(lease.store, lease.key, "lost", self.task.name, reason)
        # A holder that is asked to make way still has its lease, so it has time to end in order.
        if policy == "kill" and reason not in MAKES_WAY:
            os.kill(os.getpid(), signal.SIGKILL)
        if policy != "warn":
            self.interrupt.send(LockLost(lease.key, reason))
        background.submit(partial(signals.lock_lost.send, sender=self.task, lease=lease, reason=reason))

    # How it goes back to the broker.

    def send_again(self, delay: float, **notes: Any) -> Any:
        """Publish its message again, as `message.send_again` does; the call goes on with that."""
        try:
            again = message.send_again(self.task, self.key, delay, is_copy=self.is_copy, **notes)
        except Reject:
            self._goes_on = True
            raise
        self._goes_on = True
        return again

    def delay(self, first: float, longest: float, expires_in: float = float("inf")) -> float:
        """Seconds until it should come again: jittered, and longer each time."""
        delay = self.jittered(min(longest, self.options.ttl / 3, first * 2 ** min(self.notes.tries, 10)))
        return min(delay, max(first / 5, expires_in))

    def jittered(self, delay: float) -> float:
        """At most *delay* seconds, and no more than a message can wait for its time."""
        # The message stays unacknowledged until then. Near the visibility timeout it would be delivered a second time.
        delay = min(delay, self.options.visibility_timeout / 4)
        return random.uniform(delay / 2, delay)

    def come_again(self, why: Exception, delay: float, **notes: Any) -> NoReturn:
        """Come again, as a task that retries does, but do not count it as a retry.

        Raises:
            Retry: Always.
        """
        self._store_retry(why)
        raise Retry(str(why), exc=why, when=delay, sig=self.send_again(delay, **notes))

    def note_retry(self, key: str) -> None:
        """Its body is about to publish its next attempt, with this key."""
        self.retry_key = key
        error = self.retries_because_of
        self._store_retry(error, "".join(format_exception(error)) if error is not None else None)

    def _store_retry(self, why: BaseException | None, traceback: str | None = None) -> None:
        """Store it before the message leaves; Celery does so afterwards, and may overwrite the end of the retry."""
        if self.task.ignore_result or self.request.ignore_result:
            return
        try:
            self.task.backend.mark_as_retry(self.request.id, why, traceback, request=self.request)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises; Celery tries again, and tells)
            logger.warning("lock.result_failed key=%s task_id=%s: %s", self.key, self.task_id, error)
            return
        self._retry_is_stored = True

    # How it ends without its body.

    def held_by(self, holder: Holder) -> LockHeld:
        return LockHeld(self.key, holder.task_id, holder.expires_in, holder.state)

    def skip(self, text: str, reason: Reason, holder: str | None = None) -> Any:
        """The result of a skipped run, if it has one; otherwise it ends as REVOKED."""
        if self.options.skips_with_result:
            return self.options.skip_result
        self.revoke(text, reason, holder)
        return None

    def revoke(self, text: str, reason: Reason, holder: str | None) -> None:
        """End as REVOKED, or without a result in the header of a chord, whose body waits for every member."""
        # An item has no state of its own to store; its map has a place for its result.
        if self.is_item:
            return
        try:
            revoke(self.task, CallRevoked(text, self.key, holder, reason))
        except Revoked:
            # Celery sends no event for a run that stores its own end, so for a monitor the run would go on for ever.
            self.send_event("task-revoked", terminated=False, signum=None, expired=False)
            raise

    def end_delivery(self, reason: str) -> NoReturn:
        """End this delivery of the message without a trace, because another delivery ends the call.

        Raises:
            Ignore: Always; not Retry, which would store a state over the one of the run that goes on.
        """
        self._goes_on = True
        raise Ignore(reason)

    def report_conflict(self, holder: Holder, outcome: signals.ConflictOutcome) -> None:
        """Report the outcome of a run that was not done: in the log, by the signal, and by an event."""
        facts = self.key, self.task_id, holder.task_id, holder.state, holder.age, holder.expires_in, outcome
        # A call that asks every few seconds is still one call.
        is_first = outcome not in _POLLS or not (self.notes.since or self.notes.joins)
        level = logging.INFO if is_first else logging.DEBUG
        event = "lock.conflict key=%s task_id=%s holder=%s state=%s age=%.1f remaining=%.1f outcome=%s"
        logger.log(level, event, *facts)
        if is_first:
            count(self.store, self.key, "conflicts", self.task.name, outcome)
        signals.lock_conflict.send(sender=self.task, key=self.key, holder=holder, outcome=outcome)
        # Not `task-...`: a monitor would take what follows for a state of the task.
        self.send_event("lock-conflict", key=self.key, holder=holder.task_id, outcome=outcome)

    def send_event(self, event: str, **facts: Any) -> None:
        """Send an event, if the worker of this run sends events."""
        if not self.delivery.sends_events:
            return
        try:
            self.task.send_event(event, **facts)
        except OperationalError as error:
            # A broker that is away costs the event, and nothing else.
            logger.warning("lock.event_failed key=%s task_id=%s: %s", self.key, self.task_id, error)

    def check_not_replaced(self) -> None:
        """Return if it may still publish a retry or a replacement.

        Raises:
            LockLost: It was asked to make way, so nothing of it comes after its successor.
        """
        if self.was_replaced:
            raise LockLost(self.key, self.lease.lost_reason or "replaced")

    def __enter__(self) -> None:
        """Count it as under way; `__exit__` gives back what it holds."""
        self.is_under_way = True

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self.is_under_way = False
        if error is not None and isinstance(error, Ignore | Reject | Retry):
            self.ended_with = error
        if not (isinstance(error, Retry) and self._is_stored_as_retry_next()):
            self.give_back()
            self.is_over = not (self.has_marker or self.ended_with or self.before)

    def _is_stored_as_retry_next(self) -> bool:
        """Celery stores RETRY after this, so the next attempt must not begin: it could end before that.

        Then `on_retry`, and at the latest the receiver of `task_postrun`, gives back what is held.
        """
        if self.is_item or self.request.is_eager:
            # It has no message, so Celery stores nothing.
            return False
        if self._retry_is_stored:
            self.request.ignore_result = True
        is_ignored = self.task.ignore_result or (_HEEDS_REQUEST and self.request.ignore_result)
        return bool(self.task.store_errors_even_if_ignored or not is_ignored)

    def give_back(self) -> None:
        """Give back what it holds; nothing if that was done."""
        if self.lease.unreleased:
            self.has_marker = self.lease.release(self.ending) is Answer.MARKED
        if self.lease.fence == 0 and not self._goes_on:
            self.unmark()

    def unmark(self) -> None:
        """End what the call has left in the store: its message has ended for good."""
        if self.notes.left_something:
            unmark(self.store, self.key, self.task_id, may_arrive=self.lease.is_unanswered)
            self.notes.marked = self.notes.asked = False

    def begins(self) -> None:
        """Its body is about to run: a retry of it begins a new wait."""
        self.has_begun = True
        headers = self.request.headers
        if type(headers) is dict:
            # A body may hand its headers on to other calls.
            headers.pop(DELIVERY, None)
        if not self.notes.published:
            self.notes = self.notes.dated()
            self.notes.task_id = text_of(self.request.id or "")


def has_run(request: Context, *, may_try_again: bool) -> bool:
    """The request has a run: it is under way, or, unless another one may follow, has ended."""
    run = delivery.run_of(request)
    return run is not None and (run.is_under_way or not may_try_again)


def run_for(task: Task, request: Context, notes: Notes, key: str, args: Any, kwargs: Any) -> Run:
    """The run that the request has from now on, where it may have had one: a `__call__` before ours may try again.

    Raises:
        Ignore, Reject, Retry: The end of the run before, because its call is over, or goes on by another message.
    """
    before = delivery.run_of(request)
    if before is None or before.is_under_way:
        run = delivery.state_for(request).run = Run(task, request, notes, key, args, kwargs)
        return run
    if before.ended_with is not None:
        raise before.ended_with
    # A signal may have broken that off.
    before.give_back()
    # The release of its token may be repeated in the background.
    vars(request)[DELIVERY] = before.delivery._replace(token="")
    run = delivery.state_for(request).run = Run(task, request, notes, key, args, kwargs)
    # Only the first run can leave a marker, and a call may try very often.
    run.before = before if before.has_marker else before.before
    # The run before was of this very delivery, so this is no copy of a run that may live, or has ended. And the
    # message goes back to the broker no more, because the body has run, and its cool-down may refuse this run.
    run.is_copy = run.claim.may_be_copy = run.can_come_again = False
    return run


def _lost(run: "ref[Run]", lease: Lease) -> None:
    # A weak reference, so that a run which nothing refers to any more does not keep its lease alive.
    if (one := run()) is not None and not one.is_unlocked:
        one.on_lost(lease)


def kills_itself(task: Task, options: LockOptions, *, has_process: bool) -> bool:
    """A run of the task ends with its process if its lease is lost.

    Raises:
        ConfigurationError: It would, and no run of the task has a process of its own.
    """
    if options.on_lost != "kill" or options.mode == "until_executing":
        return False
    if not has_process:
        raise ConfigurationError(
            f"task {task.name}: lock_on_lost='kill' needs a process to kill, which only the prefork pool has; "
            "run the worker with --pool prefork, or use 'abort'"
        )
    return True
