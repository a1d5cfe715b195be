"""Which lock, or which call, an operator means by what was typed."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import click

from celery_singleton_lock.log import shown
from celery_singleton_lock.operations.rows import Locks, a_few
from celery_singleton_lock.options import Lockable
from celery_singleton_lock.stores.records import LockState


def named(
    locks: Locks, what: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[LockState, str | None]:
    """The lock, and the task id if one call is meant; a call that is in no lock has one of its own name.

    Raises:
        click.UsageError: It means nothing, or several things.
    """
    what = what.strip().removesuffix("…")
    if not what:
        raise click.UsageError("Give a lock key, a task with its arguments, or a task id.")
    if args is None and kwargs is None and what not in locks.app.tasks:
        if locks.is_key(what):
            return locks.survey(what), None
        found = _found(locks, what)
        if len(found) > 1:
            which = a_few([shown(name) for name in found], most=10)
            raise click.UsageError(f"{what!r} is the beginning of several: {which}. Give more of one of them.")
        if found:
            return next(iter(found.values()))
        if "{" in what:
            locks.checked_key(what)
        if not any(name.startswith(what) for name in locks.app.tasks):
            return LockState(what), what
    return locks.survey(_key_of_call(_task_named(locks.app.tasks, what), args or [], kwargs or {})), None


def _found(locks: Locks, start: str) -> dict[str, tuple[LockState, str | None]]:
    """The locks whose key, or the digest in it, begins so, by their keys; and the calls, by their task ids."""
    found = dict[str, tuple[LockState, str | None]]()
    for row in locks.rows(with_turns=True):
        key = row.lock.key
        task_id = row.about.task_id or ""
        if key.startswith(start) or key.rpartition(":")[2].startswith(start):
            found[key] = row.lock, None
        if task_id.startswith(start):
            # Of several locks, the one that it holds comes first.
            found.setdefault(task_id, (row.lock, task_id))
    # What is typed in full is no beginning.
    return {start: found[start]} if start in found else found


def _task_named(tasks: Mapping[str, Any], name: str) -> Any:
    begins = [name] if name in tasks else sorted(each for each in tasks if each.startswith(name))
    if len(begins) != 1:
        near = begins[:3] or [each for each in tasks if each.endswith(f".{name}")][:1]
        near = near or get_close_matches(name, tasks, n=1)
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise click.UsageError(f"There is no task {name!r} in this app.{meant}")
    task = tasks[begins[0]]
    if not isinstance(task, Lockable):
        raise click.UsageError(f"The task {task.name!r} is not a SingletonTask, so it has no locks.")
    return task


def _key_of_call(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    try:
        return str(task.lock_key_of_some(*args, **kwargs))
    except (TypeError, ValueError) as error:
        advice = "give the arguments that make its key, as -a '[7]' or -k '{...}'"
        raise click.UsageError(f"The task {task.name!r} cannot be called like this: {error}; {advice}") from error
