"""Ending a task as REVOKED, and whatever waits for it: later steps of its chain, and the chords they are in."""

from collections.abc import Iterator
from typing import Any

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Ignore, TaskRevokedError


class Revoked(Ignore):
    """The task has ended as REVOKED; in eager mode `apply` makes the result of it."""

    def __init__(self, error: TaskRevokedError) -> None:
        super().__init__(str(error))
        self.error = error


def revoke(task: Task, reason: str) -> None:
    """End as REVOKED, or without a result in the header of a chord, whose body waits for every member.

    Raises:
        Revoked: So that Celery stores nothing else.
    """
    request, error = task.request, TaskRevokedError(reason)
    if request.chord:
        return
    if not request.is_eager:
        if not (task.ignore_result or request.ignore_result):
            task.backend.store_result(request.id, error, states.REVOKED, request=request)
        _end_later_steps(task, error)
    raise Revoked(error)


def _end_later_steps(task: Task, error: TaskRevokedError) -> None:
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
