"""What a call has left in the store while it holds nothing; it ends once its message has ended for good."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery, Task, states
from celery.exceptions import Ignore, Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.delivery import notes_of
from celery_singleton_lock.runs.endings import final_result
from celery_singleton_lock.runs.notes import Notes, text_of
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Holder
from celery_singleton_lock.stores.redis.store import Store

if TYPE_CHECKING:
    from celery_singleton_lock.runs.run import Run

# Seconds for which to try to end a mark.
_PATIENCE = 60.0
# The shortest time that the store knows.
_A_MOMENT = 0.001


def seconds_until(task: Task, moment: Any) -> float:
    """Seconds from now until *moment*, in any form that `apply_async` takes or a message has."""
    if isinstance(moment, int | float):
        return float(moment)
    until: timedelta = maybe_make_aware(maybe_iso8601(moment), task.app.timezone) - datetime.now(UTC)
    return until.total_seconds()


def until_expired(task: Task, expires: Any) -> float:
    """Seconds from now in which the call may still begin; at least a moment, and infinite without `expires`."""
    return float("inf") if expires is None else max(_A_MOMENT, seconds_until(task, expires))


def unmark(store: Store, key: str, task_id: str, *, ends_cooldown: bool = True, may_arrive: bool = False) -> None:
    """End it now, or in the background if the store does not answer; see `PendingRelease` for *may_arrive*."""
    try:
        store.unmark(key, task_id, ends_cooldown=ends_cooldown)
        is_answered = True
    except StoreError:
        is_answered = False
    if not is_answered or may_arrive:
        unmark_later(store, key, task_id, ends_cooldown=ends_cooldown, may_arrive=may_arrive)


def unmark_later(store: Store, key: str, task_id: str, *, ends_cooldown: bool = True, may_arrive: bool = False) -> None:
    """End it in the background: a main process waits for no store."""
    end = partial(store.unmark, key, task_id, ends_cooldown=ends_cooldown)
    background.submit(PendingRelease(store, key, task_id, clock() + _PATIENCE, end, may_arrive=may_arrive))


@contextmanager
def queued_until_its_workflow_ends(run: "Run") -> Iterator[None]:
    """In `until_executed`, the call counts as queued until what `replace()` publishes inside has ended.

    That is known by the result under its own task id, for which whoever comes looks. If there is none, the mark ends
    after `lock_queue_ttl`.
    """
    task = run.task
    options = run.options
    if options.mode != "until_executed" or not run.can_be_requeued:
        yield
        return
    since = 0
    if final_result(task, run.task_id):
        # The end of an earlier call with its id, over which Celery would store no other.
        since = run.published
        with suppress(Exception):
            task.backend.forget(run.request.id)
    about: dict[str, Any] = {"label": run.claim.facts.label, "published": since, "due_for": _A_MOMENT}
    try:
        run.store.mark_queued(run.key, run.task_id, options.queue_ttl, limit=0, cooldown=0.0, sent="over", **about)
    except StoreError as error:
        if options.on_store_error == "raise":
            raise
        told = {"key": run.key, "task_id": run.task_id, "outcome": "published"}
        log.write(logging.WARNING, "lock.unanswered", "%s", error, **told)
    try:
        yield
    except Ignore:
        raise
    except BaseException:
        unmark(run.store, run.key, run.task_id, ends_cooldown=False)
        raise


def has_ended(task: Task, found: Holder) -> bool:
    """The queued call, or the workflow that replaces it, has ended, and nothing of it will come to end its mark.

    For example, Celery stores REVOKED long before the message of the call comes.
    """
    is_queued = found.task_id is not None and not (found.fence or found.token)
    return is_queued and final_result(task, str(found.task_id), found.published) is not None


def unmark_unread(app: Celery, headers: Mapping[str, Any]) -> None:
    """In the background, end the marks of a call whose message a worker has thrown away unread.

    Raises:
        Exception: Any error that headers can cause that are not a task's, or not ours.
    """
    notes = Notes.of(headers, headers.get("id"))
    if notes.key and notes.left_something:
        unmark_later(store_of(app), notes.key, str(headers["id"]))


def unmark_unstarted(task: Task, state: str | None, retval: Any) -> None:
    """End it for the present request, which was refused before it asked for its lock, for example by `before_start`."""
    request = task.request
    is_requeued = isinstance(retval, Reject) and retval.requeue and task.acks_late
    if state == states.RETRY or is_requeued:
        return
    try:
        notes = Notes() if request.called_directly else notes_of(request)
    except ConfigurationError:
        # Its result tells already.
        return
    if notes.key and notes.left_something:
        unmark(store_of(task.app), notes.key, text_of(request.id))
