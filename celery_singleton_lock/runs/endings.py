"""How a run ends without its body: as REVOKED, through chains and chords; and the results of other runs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from celery import Task, states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, TaskRevokedError
from celery.result import EagerResult

from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.runs.delivery import run_of
from celery_singleton_lock.stores.records import Holder, HolderState

Reason = Literal["skipped", "superseded", "replaced", "broken", "joined", "unpublished", "unanswered"]
"""Why a call has ended as REVOKED: the outcome in the log, if there was a conflict."""

# Among the arguments of Celery's `apply`.
_PLACE_OF_THROW = 6


class CallRevoked(TaskRevokedError, SingletonLockError):
    """The call has ended as REVOKED; the error names the call that does the work instead.

    Arguments:
        text: The same in words.
        key: The lock key.
        holder_task_id: Task id of the other call, or None if it is not a task, or not known.
        reason: `skipped` (the other one holds the key), `superseded` (the other one runs in
            place of this one), `replaced` (the other one has taken over), `broken` (a person has asked this
            one to end), `joined` (the other one, which this one had joined, was revoked),
            `unpublished` (the other one stands for this one), or `unanswered` (Redis gave no answer).
    """

    # The result backend stores this name with each result, so it must stay, even if this file gets another name.
    __module__ = "celery_singleton_lock"

    def __init__(self, text: str, key: str, holder_task_id: str | None, reason: Reason) -> None:
        super().__init__(text, key, holder_task_id, reason)
        self.key = key
        self.holder_task_id = holder_task_id
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class Revoked(Ignore):
    """The task ends as REVOKED, to be stored once its run holds nothing; in eager mode its result is made from this."""

    def __init__(self, error: CallRevoked) -> None:
        super().__init__(str(error))
        self.error = error


def store_revoked(task: Task, error: CallRevoked) -> None:
    """Store REVOKED for the present request, and for what is behind it in a chain."""
    request = task.request
    is_kept = task.store_eager_result if request.is_eager else True
    if is_kept and not (task.ignore_result or request.ignore_result):
        task.backend.store_result(request.id, error, states.REVOKED, request=request)
    if not request.is_eager:
        _end_later_steps(task, error)


def eager_result(task: Task, result: EagerResult, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EagerResult:
    """What `apply` returns that was called with these arguments: REVOKED if the call has ended so, else *result*.

    Raises:
        CallRevoked: It has ended so, and Celery would raise an error of it as well.
    """
    if not isinstance(result.result, Revoked):
        return result
    error = result.result.error
    throw = args[_PLACE_OF_THROW] if len(args) > _PLACE_OF_THROW else kwargs.get("throw")
    if throw or (throw is None and task.app.conf.task_eager_propagates):
        raise error
    return EagerResult(result.id, error, states.REVOKED, name=task.name)


def _end_later_steps(task: Task, error: CallRevoked) -> None:
    """End the rest of the chain; Celery's own way leaves groups out, and everything if this result is ignored."""
    for signature, is_member in tasks_in(task.request.chain or ()):
        options = signature.get("options") or {}
        step = Context(signature, **options, id=options.get("task_id"), group=options.get("group_id"))
        if step.id is not None:
            task.backend.store_result(step.id, error, states.REVOKED, request=step)
        # Nobody counts the members of a chord that never begins, because the chord's body ends as they do.
        if step.chord and not is_member:
            task.backend.on_chord_part_return(step, states.REVOKED, error)


def tasks_in(signatures: Any, *, is_member: bool = False) -> Iterator[tuple[Any, bool]]:
    """The signature of each task in these, however deep, and whether the task is in the header of one of the chords."""
    for signature in [signatures] if isinstance(signatures, Mapping) else signatures:
        kwargs = signature.get("kwargs") or {}
        if signature.get("subtask_type") == "chord":
            yield from tasks_in(kwargs["header"], is_member=True)
            yield from tasks_in(kwargs["body"], is_member=is_member)
        elif signature.get("subtask_type") in ("group", "chain"):
            yield from tasks_in(kwargs["tasks"], is_member=is_member)
        else:
            yield signature, is_member


class StoresRetryOnce:
    """The result backend of a task, which keeps Celery from storing RETRY of a run that has stored it."""

    def __init__(self, task: Task) -> None:
        backend = task.backend
        self._app = task.app
        # That of an app may differ from thread to thread.
        self._own = None if backend is task.app.backend else backend

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Others ask which kind of backend it is.
        return type(self._backend)

    @property
    def _backend(self) -> Any:
        return self._own or self._app.backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def mark_as_retry(self, *args: Any, request: Any = None, **kwargs: Any) -> Any:
        """As Celery's, unless that was done as the message of the next attempt left."""
        run = run_of(request)
        is_stored = run is not None and run.stored_retry is not None
        return None if is_stored else self._backend.mark_as_retry(*args, request=request, **kwargs)


def store_retry_once(task: Task) -> None:
    """From now on, RETRY of the task's runs is stored by us alone."""
    if type(task.backend) is not StoresRetryOnce:
        # A property of the user's own has no setter, perhaps.
        with suppress(AttributeError):
            task.backend = StoresRetryOnce(task)


# The results of other runs.

TASKS_OF_ITEMS = ("celery.map", "celery.starmap")
"""The tasks that call the items of `map`, `starmap` and `chunks`. Their result is that of all items together."""


def has_result(task: Task, holder: Holder) -> bool:
    """The result backend has, or will have, the result of the holder's run, and every process can read it.

    The result of a call that has ended may be deleted already, so nobody waits for that one.
    """
    is_lock = holder.task_id is None
    is_item = holder.task_name in TASKS_OF_ITEMS
    # The store does not know the task of a turn, which may be that of an item.
    has_turn = holder.state is HolderState.WAITING
    if is_lock or is_item or has_turn or holder.call_ended or not holder.keeps_result:
        return False
    return not why_unreadable(task.app.tasks.get(holder.task_name, task))


def why_unreadable(task: Any) -> str:
    """Why only its own caller can read a result of the task; empty if every process can."""
    if isinstance(task.backend, DisabledBackend):
        return "there is no result backend; set app.conf.result_backend"
    if isinstance(task.backend, RPCBackend):
        return "rpc:// gives a result to its caller only; use another result backend"
    return "the task has ignore_result=True, so its holder keeps none" if task.ignore_result else ""


def final_result(task: Task, task_id: str, since: int = 0) -> dict[str, Any] | None:
    """The stored end of the call, if it has ended and its result can be read.

    A task id may be used again, and then the end of an earlier call is there meanwhile. Where that may be, only an end
    counts that was stored *since* this call was published, in microseconds since the epoch.
    """
    if why_unreadable(task):
        return None
    try:
        # A cache would have the end of the earlier call.
        kept: dict[str, Any] = task.backend.get_task_meta(task_id, cache=False)
        is_its_own = kept.get("status") in states.READY_STATES and (not since or _moment_of(kept) >= since)
    except Exception:  # noqa: BLE001 (whatever a backend raises, or its date cannot be read)
        return None
    return kept if is_its_own else None


def _moment_of(kept: Mapping[str, Any]) -> int:
    """When it was stored, by the clock of a worker, in microseconds since the epoch; 0 if it does not say so."""
    date = kept.get("date_done")
    date = datetime.fromisoformat(date) if isinstance(date, str) else date
    # Some backends give the date without its zone, which is UTC.
    return round((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() * 1_000_000) if date else 0


def store_final_result(task: Task, task_id: str, request: Any, kept: Mapping[str, Any]) -> None:
    traceback = kept.get("traceback")
    task.backend.store_result(task_id, kept["result"], kept["status"], traceback=traceback, request=request)
