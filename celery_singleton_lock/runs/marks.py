"""What a call has left in the store while it holds nothing; it ends once its message has ended for good."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from celery import Celery, Task, states
from celery.exceptions import Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.runs.delivery import notes_of
from celery_singleton_lock.runs.notes import Notes, text_of
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.redis.store import Store

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
    background.submit(PendingRelease(store, key, task_id, _PATIENCE, end, may_arrive=may_arrive))


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
    request, is_requeued = task.request, isinstance(retval, Reject) and retval.requeue and task.acks_late
    if state == states.RETRY or is_requeued:
        return
    try:
        notes = Notes() if request.called_directly else notes_of(request)
    except ConfigurationError:
        # Its result tells already.
        return
    if notes.key and notes.left_something:
        unmark(store_of(task.app), notes.key, text_of(request.id))
