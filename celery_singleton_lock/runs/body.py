"""The body of a run, and how it ends."""

import inspect
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError as ThreadsCancelledError
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import GeneratorType
from typing import Any, Literal

from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock.errors import REASONS_TO_STOP, LockLost, NotHeldReason, StoreError
from celery_singleton_lock.leases.holding import LOST, NEW, RELEASED
from celery_singleton_lock.leases.lease import KnownHolds, current, holds, is_undone, refusal_of
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.endings import A_MOMENT, WORKFLOWS, Ended, final_result, unmark, workflows_of
from celery_singleton_lock.runs.message import has_copies, is_long_here
from celery_singleton_lock.runs.run import UNLOCKED, Run
from celery_singleton_lock.stores.records import Ending, marker_of

_ending = lru_cache(Ending)


def run_body(run: Run, body: Callable[..., Any]) -> Any:
    """Call the body. Raise `Revoked` if a request to stop has reached the body, even if the body then returned."""
    locks = holds.get()
    try:
        try:
            result = body(*run.args, **run.kwargs) if run.phase is UNLOCKED else _under_its_lease(run, body)
        finally:
            if holds.get() is not locks:
                _give_back_locks(run, locks)
    except Exception as error:
        run.lease.ending = _ending_of(run, error)
        reason = _asked_to_stop(run, error)
        if reason is None:
            raise
    else:
        run.lease.ending = _ending_of(run, None)
        if run.lease.lost_reason is None:
            return result
        reason = _asked_to_stop(run, None)
        if reason is None:
            # A holder that was asked to stop still has its lease.
            if run.lease.state is LOST:
                text = "the body ran to its end after the loss"
                told = {"key": run.key, "task_id": run.task_id, "reason": run.lease.lost_reason}
                log.error("lock.finished_without_lease", text, **told)
            return result
    return _preempted(run, reason).unwrap()


def _give_back_locks(run: Run, before: KnownHolds) -> None:
    # Newest first: giving back an older hold of a lease would make the newer hold count as released.
    for known in reversed(holds.get()):
        if known not in before and (hold := known()) is not None:
            if hold.lasts:
                text = "the body ended without releasing this Lock"
                log.warning("lock.left_held", text, key=hold.lease.key, task_id=run.task_id)
            hold.give_back()


def _under_its_lease(run: Run, body: Callable[..., Any]) -> Any:
    lease = run.lease
    lease.report_granted()
    before = current.get()
    try:
        current.set((*before, lease.weak))
        with run.interrupt:
            # If the lease was lost before the `with`, nothing has been interrupted.
            if lease.lost_reason is not None and run.options.on_lost != "warn":
                raise _lost(run)
            result = body(*run.args, **run.kwargs)
            if result is not None and is_undone(result):
                _refuse_unfinished(run, result)
            return result
    except (CancelledError, ThreadsCancelledError) as error:
        if not run.interrupt.delivered:
            raise
        # The interrupt has cancelled the asyncio tasks of the body.
        raise _lost(run) from error
    finally:
        current.set(before)


def _ending_of(run: Run, error: Exception | None) -> Ending | None:
    """What later deliveries of the message learn; None if they should run the body again."""
    if not run.can_be_requeued or run.lease.state in (NEW, RELEASED):
        return None
    outcome = "ended" if error is None else _outcome_of(run.task, error)
    if outcome is None:
        return None
    options = run.options
    is_due = is_long_here(run.delivery, options, late=run.task.acks_late)
    if not is_due and run.way != "first":
        is_due = has_copies(run.request, run.notes, run.delivery, options)
    return _ending(outcome, options.redelivered_within, is_due)


def _outcome_of(task: Task, error: Exception) -> Literal["ended", "retried"] | None:
    if isinstance(error, Reject):
        return None if error.requeue else "retried"
    if isinstance(error, Ignore | Retry):
        return "retried"
    # `acks_on_failure` is new in Celery 5.7.
    is_acknowledged = getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout)
    return None if task.acks_late and not is_acknowledged else "ended"


def _refuse_unfinished(run: Run, result: Any) -> None:
    """Refuse a result whose work would begin after the release.

    This is an awaitable, an async generator, or what a generator function returns.
    """
    if isinstance(result, GeneratorType) and not inspect.isgeneratorfunction(inspect.unwrap(run.task.run)):
        return
    advice = "write a `def` that does the work before it returns, such as `return asyncio.run(work())`"
    raise refusal_of(result, f"task {run.task.name}: its body", advice)


def _lost(run: Run) -> LockLost:
    return LockLost(run.key, run.lease.lost_reason or "expired")


def _asked_to_stop(run: Run, error: Exception | None) -> NotHeldReason | None:
    if run.was_replaced:
        return run.lease.lost_reason
    if isinstance(error, LockLost) and error.key == run.key and error.reason in REASONS_TO_STOP:
        return error.reason
    return None


def _preempted(run: Run, reason: NotHeldReason) -> Ended:
    is_broken = reason == "broken"
    successor = None
    by = None
    try:
        if is_broken:
            by = run.store.asked_to_stop_by(run.claim, "broken")
        else:
            successor = run.store.asked_to_stop_by(run.claim, "replaced")
        if run.stored_retry:
            # Cancel the published retry: otherwise it would run after the newer call, or after a person's `break`.
            marker = marker_of(run.task_id, run.notes.published)
            run.store.mark_done(run.stored_retry, marker, run.request.retries + 1, "stored", run.options.queue_ttl)
            run.store.unmark(run.stored_retry, run.task_id)
    except StoreError as error:
        log.warning("lock.successor_unknown", "%s", error, key=run.key, task_id=run.task_id)
    if is_broken:
        log.warning("lock.broken", key=run.key, task_id=run.task_id, by=by)
        return run.revoked(f"lock key={run.key}: broken by {by}", "broken", None)
    return run.revoked(f"lock key={run.key}: replaced by task_id={successor}", "replaced", successor)


@contextmanager
def queued_until_its_workflow_ends(run: Run) -> Iterator[None]:
    """In `until_executed`, count the call as queued until the workflow that `replace()` publishes here has ended.

    `end_workflows` ends the mark. If the last step's worker lacks this library, the next caller ends the mark.
    """
    task = run.task
    options = run.options
    if options.mode != "until_executed" or not run.can_be_requeued:
        yield
        return
    since = 0
    if final_result(task, run.task_id):
        # Celery would not overwrite the end of an earlier call with this id.
        since = run.notes.first_published
        with suppress(Exception):
            task.backend.forget(run.request.id)
    about: dict[str, Any] = {"label": run.claim.label, "published": since, "due_for": A_MOMENT}
    try:
        run.store.mark_queued(run.key, run.task_id, options.queue_ttl, limit=0, cooldown=0.0, sent="over", **about)
    except StoreError as error:
        if options.on_store_error == "raise":
            raise
        told = {"key": run.key, "task_id": run.task_id, "outcome": "published"}
        log.warning("lock.unanswered", "%s", error, **told)
    message = vars(task.request)
    message[WORKFLOWS] = [*workflows_of(message), [run.key, run.task_id]]
    try:
        yield
    except Ignore:
        raise
    except BaseException:
        unmark(run.store, run.key, run.task_id, ends_cooldown=False)
        raise
