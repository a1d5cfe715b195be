"""What a call has left in the store while it holds nothing; it ends once its message has ended for good."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any

from celery import Celery, Task, states
from celery._state import get_current_task
from celery.backends.base import Backend
from celery.exceptions import Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.runs.delivery import notes_of
from celery_singleton_lock.runs.endings import final_result, tasks_in
from celery_singleton_lock.runs.notes import Notes, text_of
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Holder
from celery_singleton_lock.stores.redis.store import Store

# Seconds for which to try to end a mark.
_PATIENCE = 60.0
A_MOMENT = 0.001
"""The shortest time that the store knows, in seconds."""


def seconds_until(task: Task, moment: Any) -> float:
    """Seconds from now until *moment*, in any form that `apply_async` takes or a message has."""
    if isinstance(moment, int | float):
        return float(moment)
    until: timedelta = maybe_make_aware(maybe_iso8601(moment), task.app.timezone) - datetime.now(UTC)
    return until.total_seconds()


def until_expired(task: Task, expires: Any) -> float:
    """Seconds from now in which the call may still begin; at least a moment, and infinite without `expires`."""
    return float("inf") if expires is None else max(A_MOMENT, seconds_until(task, expires))


def unmark(
    store: Store,
    key: str,
    task_id: str,
    *,
    ends_cooldown: bool = True,
    call_ended: bool = False,
    may_arrive: bool = False,
    in_background: bool = False,
) -> None:
    """End it now, or *in_background* for a main process, which waits for no store; see `Store.unmark`.

    If the store does not answer, it is ended in the background as well. See `PendingRelease` for *may_arrive*.
    """
    end = partial(store.unmark, key, task_id, ends_cooldown=ends_cooldown, call_ended=call_ended)
    is_answered = False
    if not in_background:
        with suppress(StoreError):
            end()
            is_answered = True
    if may_arrive or not is_answered:
        background.submit(PendingRelease(store, key, task_id, clock() + _PATIENCE, end, may_arrive=may_arrive))


# Workflows.

WORKFLOWS = "singleton_workflows"
"""The header of each step of a workflow: lock key and task id of each call that the workflow replaces."""


def workflows_of(message: Mapping[str, Any]) -> list[list[str]]:
    """Lock key and task id of each call whose workflow has this message as a step."""
    written = message.get(WORKFLOWS)
    pairs = written if isinstance(written, list) else []
    # A header of this name that somebody else has written is not read.
    return [each for each in pairs if isinstance(each, list) and list(map(type, each)) == [str, str]]


def end_workflows(app: Celery, task_id: Any, message: Mapping[str, Any], *, has_failed: bool = True) -> None:
    """End the marks of the workflows that end with this step, just before the step's end is stored.

    If the mark ended later, a caller could get the result, forget it and publish the next call in time to be refused.
    That call would not be sent, and its caller would wait for a result that nobody stores again. The run that has
    replaced itself may still hold the key, for example in a `finally`; from now on it refuses no publisher, either.

    The *message* has the step's headers and the `chain` behind the step, which ends as well if the step *has_failed*.
    """
    if not (workflows := workflows_of(message)):
        return
    # No task runs in a main process.
    is_main = get_current_task() is None
    # Whatever is wrong with the message or the store, the step's end is stored. The next call looks for that end.
    with suppress(Exception):
        behind = tasks_in(message.get("chain") or () if has_failed else ())
        ending = [text_of(task_id), *(text_of(step["options"].get("task_id")) for step, _ in behind)]
        for key, replaced in workflows:
            if replaced in ending:
                unmark(store_of(app), key, replaced, ends_cooldown=False, call_ended=True, in_background=is_main)


def _step_by_step(replace: Callable[..., Any]) -> Callable[..., Any]:
    """`Task.on_replace`; each task of the canvas becomes a step of the workflows to which the replaced task belongs."""

    def replaced(task: Task, canvas: Any) -> Any:
        if workflows := workflows_of(vars(task.request)):
            for step, _ in tasks_in(canvas):
                options = step.setdefault("options", {})
                options["headers"] = {**(options.get("headers") or {}), WORKFLOWS: workflows}
        return replace(task, canvas)

    return replaced


def _ending_first(store: Callable[..., Any], place: int, *, has_failed: bool = True) -> Callable[..., Any]:
    """The method of a result backend that stores an end, which from now on calls `end_workflows` before it does so.

    The request is at that *place* behind the task id.
    """

    def ended(backend: Backend, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        request = args[place] if len(args) > place else kwargs.get("request")
        # Plain tasks call this, too. `hasattr` is nearly all that they pay.
        if hasattr(request, WORKFLOWS):
            end_workflows(backend.app, task_id, vars(request), has_failed=has_failed)
        return store(backend, task_id, *args, **kwargs)

    return ended


def _ending_its_body(fail: Callable[..., Any]) -> Callable[..., Any]:
    """`Backend.chord_error_from_stack`: the members of the header have ended, and the body never begins."""

    def failed(backend: Backend, callback: Any, *args: Any, **kwargs: Any) -> Any:
        for body, _ in tasks_in(callback):
            options = body.get("options") or {}
            message = {**(options.get("headers") or {}), "chain": options.get("chain")}
            end_workflows(backend.app, options.get("task_id"), message)
        return fail(backend, callback, *args, **kwargs)

    return failed


# Celery calls one of the last four for each task that ends, also if the task is killed or revoked, or keeps no result.
# No backend of Celery's has a method of its own in the place of one of them.
_IN_A_WORKER: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (Task, "on_replace", _step_by_step),
    (Backend, "mark_as_done", partial(_ending_first, place=1, has_failed=False)),
    (Backend, "mark_as_failure", partial(_ending_first, place=2)),
    (Backend, "mark_as_revoked", partial(_ending_first, place=1)),
    (Backend, "chord_error_from_stack", _ending_its_body),
)


@cache
def look_after_workflows() -> None:
    """Let this worker end the marks of the workflows whose steps it runs, whoever has written the steps.

    The methods are wrapped as they are by now: an agent may have patched them since this library was imported.
    """
    for owner, name, wrapped in _IN_A_WORKER:
        setattr(owner, name, wrapped(getattr(owner, name)))


def has_ended(task: Task, found: Holder) -> bool:
    """The queued call, or the workflow that replaces it, has ended, and nothing of it will come to end its mark.

    For example, Celery stores REVOKED long before the message of the call comes.
    """
    return found.is_queued_or_next and final_result(task, str(found.task_id), found.published) is not None


def unmark_unread(app: Celery, headers: Mapping[str, Any]) -> None:
    """End the marks of a call whose message a worker has thrown away unread, and of a workflow whose last step it was.

    Raises:
        Exception: Any error that headers can cause that are not a task's, or not ours.
    """
    end_workflows(app, headers["id"], headers)
    notes = Notes.of(headers, headers["id"])
    if notes.key and notes.left_something:
        unmark(store_of(app), notes.key, str(headers["id"]), in_background=True)


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
