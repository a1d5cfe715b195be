"""How a call ends as REVOKED, and how its marks end."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from celery import Celery, Task, states
from celery._state import get_current_task
from celery.app.task import Context
from celery.backends.base import Backend, DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, Reject, TaskRevokedError
from celery.result import EagerResult
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.errors import ConfigurationError, SingletonLockError, StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.runs.message import Notes, notes_of, text_of
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Holder, HolderState
from celery_singleton_lock.stores.redis.store import Store

Reason = Literal["skipped", "superseded", "replaced", "broken", "joined", "unpublished", "unanswered"]
"""Why a call has ended as REVOKED. After a conflict, this is the `outcome` in the log."""


class CallRevoked(TaskRevokedError, SingletonLockError):
    """The call has ended as REVOKED; the error names the call that does the work instead.

    Arguments:
        text: What has happened, in words.
        key: The lock key.
        holder_task_id: Task id of the other call, or None if it is not a task, or not known.
        reason: `skipped` (the other call holds the key), `superseded` (the other call runs instead), `replaced` (the
            other call has taken over), `broken` (a person has asked this call to stop), `joined` (the other call, which
            this one had joined, was revoked), `unpublished` (this call was not sent, because the other call was there),
            or `unanswered` (Redis gave no answer).
    """

    # Stored with each result, so this name must stay.
    __module__ = "celery_singleton_lock"

    def __init__(self, text: str, key: str, holder_task_id: str | None, reason: Reason) -> None:
        super().__init__(text, key, holder_task_id, reason)
        self.key = key
        self.holder_task_id = holder_task_id
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class Ended(NamedTuple):
    result: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class Revoked(Ignore):
    def __init__(self, error: CallRevoked) -> None:
        super().__init__(str(error))
        self.error = error


def store_revoked(task: Task, error: CallRevoked) -> None:
    request = task.request
    end_workflows(task.app, request.id, vars(request))
    is_kept = task.store_eager_result if request.is_eager else True
    if is_kept and not (task.ignore_result or request.ignore_result):
        task.backend.store_result(request.id, error, states.REVOKED, request=request)
    if request.is_eager:
        return
    # Store an end for each later step, or its caller would wait for ever. Celery's `mark_as_failure` leaves out the
    # tasks of a group, and leaves out all steps if this result is ignored.
    for signature, is_member in tasks_in(request.chain or ()):
        options = signature.get("options") or {}
        step = Context(signature, **options, id=options.get("task_id"), group=options.get("group_id"))
        if step.id is not None:
            task.backend.store_result(step.id, error, states.REVOKED, request=step)
        # A chord around the chain waits for this step. A chord inside the chain never begins: skip its members.
        if step.chord and not is_member:
            task.backend.on_chord_part_return(step, states.REVOKED, error)


def eager_result(task: Task, result: EagerResult, *, throw: bool | None) -> EagerResult:
    if not isinstance(result.result, Revoked):
        return result
    error = result.result.error
    if throw or (throw is None and task.app.conf.task_eager_propagates):
        raise error
    return EagerResult(result.id, error, states.REVOKED, name=task.name)


def tasks_in(signatures: Any, *, is_member: bool = False) -> Iterator[tuple[Any, bool]]:
    """Each task at any depth, and whether it is in the header of a chord."""
    for signature in [signatures] if isinstance(signatures, Mapping) else signatures:
        kwargs = signature.get("kwargs") or {}
        if signature.get("subtask_type") == "chord":
            yield from tasks_in(kwargs["header"], is_member=True)
            yield from tasks_in(kwargs["body"], is_member=is_member)
        elif signature.get("subtask_type") in ("group", "chain"):
            yield from tasks_in(kwargs["tasks"], is_member=is_member)
        else:
            yield signature, is_member


TASKS_OF_ITEMS = ("celery.map", "celery.starmap")
"""The tasks of `map`, `starmap` and `chunks`, which have one result for all items."""


def has_result(task: Task, holder: Holder) -> bool:
    # An item of a map has no result of its own, and a waiting call may be such an item. The result of an ended call may
    # be deleted.
    if holder.task_name in TASKS_OF_ITEMS or holder.state is HolderState.WAITING or holder.call_ended:
        return False
    keeps_result = holder.task_id is not None and holder.keeps_result
    return keeps_result and not why_unreadable(task.app.tasks.get(holder.task_name, task))


def why_unreadable(task: Any) -> str:
    """Why not every process can read the task's results; empty if every process can."""
    if isinstance(task.backend, DisabledBackend):
        return "there is no result backend; set app.conf.result_backend"
    if isinstance(task.backend, RPCBackend):
        return "rpc:// gives a result to its caller only; use another result backend"
    return "the task has ignore_result=True, so its holder keeps none" if task.ignore_result else ""


def final_result(task: Task, task_id: str, since: int = 0) -> dict[str, Any] | None:
    """As `read_final_result`; None also if the backend raises an error."""
    # Whatever a backend raises.
    with suppress(Exception):
        return read_final_result(task, task_id, since)
    return None


def read_final_result(task: Task, task_id: str, since: int = 0) -> dict[str, Any] | None:
    """The stored end of the call, unless it is unreadable, or older than *since*, in microseconds.

    A backend may raise any error.
    """
    if why_unreadable(task):
        return None
    # A cache may have the end of an earlier call with this id.
    kept: dict[str, Any] = task.backend.get_task_meta(task_id, cache=False)
    is_its_own = kept.get("status") in states.READY_STATES and (not since or _moment_of(kept) >= since)
    return kept if is_its_own else None


def _moment_of(kept: Mapping[str, Any]) -> int:
    date = maybe_iso8601(kept.get("date_done"))
    # Some backends give UTC without a zone.
    return round((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() * 1_000_000) if date else 0


# Seconds for which to try to end a mark.
_TRIES_FOR = 60.0
A_MOMENT = 0.001
"""The shortest time that the store knows, in seconds."""


def seconds_until(task: Task, moment: Any) -> float:
    """Seconds until *moment*: a countdown, a datetime, or a datetime's text in a message."""
    if isinstance(moment, int | float):
        return float(moment)
    return float((maybe_make_aware(maybe_iso8601(moment), task.app.timezone) - datetime.now(UTC)).total_seconds())


def until_expired(task: Task, expires: Any) -> float:
    """Seconds in which the call may still begin; at least a moment, and infinite without `expires`."""
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
    """As `Store.unmark`, but repeat it in the background if the store is silent or the mark *may_arrive* later."""
    end = partial(store.unmark, key, task_id, ends_cooldown=ends_cooldown, call_ended=call_ended)
    if not in_background:
        try:
            end()
        except StoreError:
            in_background = True
    if may_arrive or in_background:
        background.submit(
            PendingRelease(partial(store.servers.part_of, key), clock() + _TRIES_FOR, end, may_arrive=may_arrive)
        )


def unmark_if_ended(task: Task, key: str, found: Holder) -> bool:
    has_ended = found.is_queued_or_next and final_result(task, str(found.task_id), found.published) is not None
    if has_ended:
        unmark(store_of(task.app), key, str(found.task_id), ends_cooldown=False, call_ended=True)
    return has_ended


WORKFLOWS = "singleton_workflows"
"""The header of each step of a workflow: lock key and task id of each call that the workflow replaces."""


def workflows_of(message: Mapping[str, Any]) -> list[list[str]]:
    written = message.get(WORKFLOWS)
    pairs = written if isinstance(written, list) else []
    # Somebody else may have written this header.
    return [each for each in pairs if isinstance(each, list) and list(map(type, each)) == [str, str]]


def end_workflows(app: Celery, task_id: Any, message: Mapping[str, Any], *, has_failed: bool = True) -> None:
    """End the marks of the workflows whose last step is this one.

    If this step *has_failed*, the later steps of its chain never run: workflows that end with one of them end, too.

    Call this before the step's end is stored. Otherwise a caller who has the result could be refused the next call.
    """
    if not (workflows := workflows_of(message)):
        return
    is_main = get_current_task() is None
    # An error must not keep the step's end from being stored.
    with suppress(Exception):
        behind = tasks_in(message.get("chain") or () if has_failed else ())
        ending = [text_of(task_id), *(text_of(step["options"].get("task_id")) for step, _ in behind)]
        for key, replaced in workflows:
            if replaced in ending:
                unmark(store_of(app), key, replaced, ends_cooldown=False, call_ended=True, in_background=is_main)


def _step_by_step(replace: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Task.on_replace`: each task of the canvas becomes a step of the replaced task's workflows."""

    def replaced(task: Task, canvas: Any) -> Any:
        if workflows := workflows_of(vars(task.request)):
            for step, _ in tasks_in(canvas):
                options = step.setdefault("options", {})
                options["headers"] = {**(options.get("headers") or {}), WORKFLOWS: workflows}
        return replace(task, canvas)

    return replaced


def _ending_first(store: Callable[..., Any], position: int, *, has_failed: bool = True) -> Callable[..., Any]:
    """Wrap a method that stores an end. Of its arguments after the task id, the one at *position* is the request."""

    def ended(backend: Backend, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        request = args[position] if len(args) > position else kwargs.get("request")
        if hasattr(request, WORKFLOWS):
            end_workflows(backend.app, task_id, vars(request), has_failed=has_failed)
        return store(backend, task_id, *args, **kwargs)

    return ended


def _ending_its_body(fail: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Backend.chord_error_from_stack`: the body of a failed chord never begins."""

    def failed(backend: Backend, callback: Any, *args: Any, **kwargs: Any) -> Any:
        for body, _ in tasks_in(callback):
            options = body.get("options") or {}
            message = {**(options.get("headers") or {}), "chain": options.get("chain")}
            end_workflows(backend.app, options.get("task_id"), message)
        return fail(backend, callback, *args, **kwargs)

    return failed


# Celery calls one of the `Backend` methods for each task that ends, even without a result. No backend overrides them.
_IN_A_WORKER: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (Task, "on_replace", _step_by_step),
    (Backend, "mark_as_done", partial(_ending_first, position=1, has_failed=False)),
    (Backend, "mark_as_failure", partial(_ending_first, position=2)),
    (Backend, "mark_as_revoked", partial(_ending_first, position=1)),
    (Backend, "chord_error_from_stack", _ending_its_body),
)


@cache
def look_after_workflows() -> None:
    # Look the methods up only now: a monitoring agent may have patched them since the import.
    for owner, name, wrapped in _IN_A_WORKER:
        setattr(owner, name, wrapped(getattr(owner, name)))


def unmark_unread(app: Celery, headers: Mapping[str, Any]) -> None:
    """End the marks of a call whose message was discarded. A malformed message may make this raise any error."""
    end_workflows(app, headers["id"], headers)
    notes = Notes.of(headers, headers["id"])
    if notes.key and notes.left_something:
        unmark(store_of(app), notes.key, str(headers["id"]), in_background=True)


def unmark_unstarted(task: Task, state: str | None, retval: Any) -> None:
    """End the marks of a request that has ended before it asked for its lock."""
    request = task.request
    is_requeued = isinstance(retval, Reject) and retval.requeue and task.acks_late
    if state == states.RETRY or is_requeued:
        return
    with suppress(ConfigurationError):
        notes = Notes() if request.called_directly else notes_of(request)
        if notes.key and notes.left_something:
            unmark(store_of(task.app), notes.key, text_of(request.id))
