"""What a call has left in the store while it holds nothing; it ends once its message has ended for good."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery, Task, states
from celery._state import get_current_task
from celery.exceptions import Ignore, Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.delivery import notes_of
from celery_singleton_lock.runs.endings import final_result, tasks_in
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


def unmark(
    store: Store,
    key: str,
    task_id: str,
    *,
    ends_cooldown: bool = True,
    call_ended: bool = False,
    may_arrive: bool = False,
) -> None:
    """End it now, or in the background if the store does not answer; see `PendingRelease` for *may_arrive*."""
    try:
        store.unmark(key, task_id, ends_cooldown=ends_cooldown, call_ended=call_ended)
        is_answered = True
    except StoreError:
        is_answered = False
    if not is_answered or may_arrive:
        unmark_later(store, key, task_id, ends_cooldown=ends_cooldown, call_ended=call_ended, may_arrive=may_arrive)


def unmark_later(
    store: Store,
    key: str,
    task_id: str,
    *,
    ends_cooldown: bool = True,
    call_ended: bool = False,
    may_arrive: bool = False,
) -> None:
    """End it in the background: a main process waits for no store."""
    end = partial(store.unmark, key, task_id, ends_cooldown=ends_cooldown, call_ended=call_ended)
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


_on_replace = Task.on_replace


def on_replace(task: Task, canvas: Any) -> Any:
    """As Celery's; each task of the canvas becomes a step of the workflows to which the replaced task belongs."""
    if workflows := workflows_of(vars(task.request)):
        for step, _ in tasks_in(canvas):
            options = step.setdefault("options", {})
            options["headers"] = {**(options.get("headers") or {}), WORKFLOWS: workflows}
    return _on_replace(task, canvas)


def end_workflows(app: Celery, task_id: Any, message: Mapping[str, Any], *, has_failed: bool = True) -> None:
    """End the marks of the workflows that end with this step, just before the step's end is stored.

    If the mark ended later, a caller could get the result, forget it and publish the next call in time to be refused.
    That call would not be sent, and its caller would wait for a result that nobody stores again. The run that has
    replaced itself may still hold the key, for example in a `finally`; from now on it refuses no publisher, either.

    The *message* has the step's headers and the `chain` behind the step, which ends as well if the step *has_failed*.
    """
    if not (workflows := workflows_of(message)):
        return
    # A main process waits for no store.
    end = unmark if get_current_task() is not None else unmark_later
    # Whatever is wrong with the message or the store, the step's end is stored. The next call looks for that end.
    with suppress(Exception):
        behind = tasks_in(message.get("chain") or () if has_failed else ())
        ending = [text_of(task_id), *(text_of(step["options"].get("task_id")) for step, _ in behind)]
        for key, replaced in workflows:
            if replaced in ending:
                end(store_of(app), key, replaced, ends_cooldown=False, call_ended=True)


def look_after_workflows(app: Celery) -> None:
    """Let the workers of the app end the marks of workflows whose steps they run, whoever has written the steps."""
    # A step may replace itself, too. Celery hands no header of it on.
    Task.on_replace = on_replace
    if "_get_backend" not in vars(app):
        make = app._get_backend  # noqa: SLF001 (before Celery 5.7, each thread makes its own)
        _end_workflows_before(app.backend)
        vars(app)["_get_backend"] = lambda: _end_workflows_before(make())


def _end_workflows_before(backend: Any) -> Any:
    """The same result backend, which from now on calls `end_workflows` before it stores an end.

    Celery calls it for every task that ends, also if the task is not ours, is killed or revoked, or keeps no result.
    """
    app = backend.app
    done, failed, revoked = backend.mark_as_done, backend.mark_as_failure, backend.mark_as_revoked
    chord_failed = backend.chord_error_from_stack

    # Plain tasks call this, too. `hasattr` is all that they pay.
    def mark_as_done(task_id: Any, result: Any, request: Any = None, *args: Any, **kwargs: Any) -> Any:
        if hasattr(request, WORKFLOWS):
            end_workflows(app, task_id, vars(request), has_failed=False)
        return done(task_id, result, request, *args, **kwargs)

    def mark_as_failure(
        task_id: Any, exc: Any, traceback: Any = None, request: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if hasattr(request, WORKFLOWS):
            end_workflows(app, task_id, vars(request))
        return failed(task_id, exc, traceback, request, *args, **kwargs)

    def mark_as_revoked(task_id: Any, reason: Any = "", request: Any = None, *args: Any, **kwargs: Any) -> Any:
        if hasattr(request, WORKFLOWS):
            end_workflows(app, task_id, vars(request))
        return revoked(task_id, reason, request, *args, **kwargs)

    # The members of the header have ended, and the body never begins.
    def chord_error_from_stack(callback: Any, *args: Any, **kwargs: Any) -> Any:
        for body, _ in tasks_in(callback):
            options = body.get("options") or {}
            message = {**(options.get("headers") or {}), "chain": options.get("chain")}
            end_workflows(app, options.get("task_id"), message)
        return chord_failed(callback, *args, **kwargs)

    ours = mark_as_done, mark_as_failure, mark_as_revoked, chord_error_from_stack
    vars(backend).update((each.__name__, each) for each in ours)
    return backend


@contextmanager
def queued_until_its_workflow_ends(run: "Run") -> Iterator[None]:
    """In `until_executed`, the call counts as queued until the workflow that `replace()` publishes inside has ended.

    The worker that stores the workflow's end ends the mark: see `end_workflows`. If that worker does not load this
    library, whoever comes looks for the result under the call's task id. The mark ends after `lock_queue_ttl` anyway.
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
    message = vars(task.request)
    message[WORKFLOWS] = [*workflows_of(message), [run.key, run.task_id]]
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
    """End the marks of a call whose message a worker has thrown away unread, and of a workflow whose last step it was.

    Raises:
        Exception: Any error that headers can cause that are not a task's, or not ours.
    """
    end_workflows(app, headers["id"], headers)
    notes = Notes.of(headers, headers["id"])
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
