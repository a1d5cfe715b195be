"""Which lock, or which call, an operator means by what was typed."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import click
from celery import Celery

from celery_singleton_lock.leases.lines import shown
from celery_singleton_lock.operations.rows import Locks, a_few
from celery_singleton_lock.stores.records import LockState


def named(
    app: Celery, locks: Locks, what: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[LockState | None, str | None]:
    """The lock, and the task id if one call is meant, which may be in no lock.

    Raises:
        click.UsageError: It means nothing, or several things.
    """
    app.loader.import_default_modules()
    what = what.strip().removesuffix("…")
    if not what:
        raise click.UsageError("Give a lock key, a task with its arguments, or a task id.")
    if args is not None or kwargs is not None or what in app.tasks:
        return locks.survey(_key_of_call(_task_named(app, what), args or [], kwargs or {})), None
    if locks.is_key(what):
        return locks.survey(what), None
    keys, calls = _found(locks, what)
    if len(keys) + len(calls) > 1:
        which = a_few([shown(each) for each in (*keys, *calls)], most=10)
        raise click.UsageError(f"{what!r} is the beginning of several: {which}. Give more of one of them.")
    if keys:
        return next(iter(keys.values())), None
    for task_id, lock in calls.items():
        return lock, task_id
    tasks = [name for name, task in app.tasks.items() if name.startswith(what) and hasattr(task, "lock_key_for")]
    if len(tasks) == 1:
        return locks.survey(_key_of_call(app.tasks[tasks[0]], [], {})), None
    return (locks.survey(locks.checked_key(what)), None) if "{" in what else (None, what)


def _found(locks: Locks, start: str) -> tuple[dict[str, LockState], dict[str, LockState]]:
    """The locks whose key, or the digest in it, begins so; and those of the calls whose task id does."""
    keys, calls = dict[str, LockState](), dict[str, LockState]()
    for row in locks.rows(with_turns=True):
        key, task_id = row.lock.key, row.about.task_id or ""
        if key.startswith(start) or key.rpartition(":")[2].startswith(start):
            keys[key] = row.lock
        if task_id.startswith(start):
            # Of several locks, the one that it holds comes first.
            calls.setdefault(task_id, row.lock)
    # What is typed in full is no beginning.
    if start in keys:
        return {start: keys[start]}, {}
    return ({}, {start: calls[start]}) if start in calls else (keys, calls)


def _task_named(app: Celery, name: str) -> Any:
    begins = [each for each in app.tasks if each.startswith(name)]
    task = app.tasks.get(name) or (app.tasks[begins[0]] if len(begins) == 1 else None)
    if task is None:
        near = [each for each in app.tasks if each.endswith(f".{name}")] or get_close_matches(name, app.tasks)
        near = sorted(begins)[:3] or near[:1]
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise click.UsageError(f"There is no task {name!r} in this app.{meant}")
    if not hasattr(task, "lock_key_for"):
        raise click.UsageError(f"The task {name!r} is not a SingletonTask, so it has no locks.")
    return task


def _key_of_call(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    try:
        return str(task.lock_key_of_some(*args, **kwargs))
    except (TypeError, ValueError) as error:
        advice = "give the arguments that make its key, as -a '[7]' or -k '{...}'"
        raise click.UsageError(f"The task {task.name!r} cannot be called like this: {error}; {advice}") from error
