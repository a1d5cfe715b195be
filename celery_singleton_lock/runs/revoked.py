"""Ending a task as REVOKED, and whatever waits for it: later steps of its chain, and the chords they are in."""

from collections.abc import Iterator
from typing import Any, Literal

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Ignore, TaskRevokedError

from celery_singleton_lock.errors import SingletonLockError

Reason = Literal["skipped", "merged", "replaced", "broken", "joined", "unpublished", "unanswered"]
"""Why a call has ended as REVOKED: the outcome that the log tells, if there was a conflict."""


class CallRevoked(TaskRevokedError, SingletonLockError):
    """The call has ended as REVOKED, and says to which other call it has left the work.

    Arguments:
        text: The same in words.
        key: The lock key.
        holder_task_id: Task id of the other call, or None if it is not a task, or not known.
        reason: `skipped` (the other one holds the key), `merged` (the other one runs in place of
            this one), `replaced` (the other one has taken over), `broken` (a person has asked this
            one to end), `joined` (the other one, which this one had joined, was revoked),
            `unpublished` (the other one stands for this one), or `unanswered` (Redis gave no answer).
    """

    # Stored with each result, so it is the name that stays, and not that of this file.
    __module__ = "celery_singleton_lock"

    def __init__(self, text: str, key: str, holder_task_id: str | None, reason: Reason) -> None:
        super().__init__(text, key, holder_task_id, reason)
        self.key = key
        self.holder_task_id = holder_task_id
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class Revoked(Ignore):
    """The task has ended as REVOKED; in eager mode `apply` makes the result of it."""

    def __init__(self, error: CallRevoked) -> None:
        super().__init__(str(error))
        self.error = error


def revoke(task: Task, error: CallRevoked) -> None:
    """End as REVOKED, or without a result in the header of a chord, whose body waits for every member.

    Raises:
        Revoked: So that Celery stores nothing else.
    """
    request = task.request
    if request.chord:
        return
    is_kept = task.store_eager_result if request.is_eager else True
    if is_kept and not (task.ignore_result or request.ignore_result):
        task.backend.store_result(request.id, error, states.REVOKED, request=request)
    if not request.is_eager:
        _end_later_steps(task, error)
    raise Revoked(error)


def _end_later_steps(task: Task, error: CallRevoked) -> None:
    """End the rest of the chain; Celery's own way leaves groups out, and everything if this result is ignored."""
    for step in _tasks_in(task.request.chain or ()):
        if step.id is not None:
            task.backend.store_result(step.id, error, states.REVOKED, request=step)
        if step.chord:
            task.backend.on_chord_part_return(step, states.REVOKED, error)


def _tasks_in(signatures: Any) -> Iterator[Context]:
    """Each task inside these steps, however deep, as a request of its own."""
    for signature in signatures:
        kwargs = signature.get("kwargs") or {}
        if signature.get("subtask_type") == "chord":
            yield from _members_of(kwargs["header"])
            yield from _tasks_in([kwargs["body"]])
        elif signature.get("subtask_type") in ("group", "chain"):
            yield from _tasks_in(kwargs["tasks"])
        else:
            options = signature.get("options") or {}
            yield Context(
                signature,
                **options,
                id=options.get("task_id"),
                group=options.get("group_id"),
            )


def _members_of(header: Any) -> Iterator[Context]:
    """Those of a chord that never begins: nobody counts them, for its body ends as they do."""
    for member in _tasks_in([header] if isinstance(header, dict) else header):
        member.chord = None
        yield member
