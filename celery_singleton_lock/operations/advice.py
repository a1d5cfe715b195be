"""Advice about settings that work and may surprise."""

from collections.abc import Iterable, Iterator
from typing import Any

from celery import Celery, Task

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.operations.finding import Finding, a_few
from celery_singleton_lock.operations.workers import Workers
from celery_singleton_lock.options import LockOptions

_FEW_SLOTS = 4
_DELIVER_AGAIN = ("redis", "valkey", "sentinel", "sqs")

Tasks = dict[str, tuple[Task, LockOptions]]


def advice(app: Celery, tasks: list[Any], names: Iterable[str], workers: Workers) -> list[Finding]:
    """One finding for each piece of advice; *names* are those of the locks in the store."""
    usable = {task.name: (task, options) for task in tasks if (options := _options_of(task)) is not None}
    # Another check has told of a name that is no text.
    known = {name for task in tasks if isinstance(name := task.lock_name or task.name, str)}
    texts = [*_about_limits(app, usable), *_about_waiting(usable, workers), *_about_names(known, names)]
    if app.conf.task_always_eager and tasks:
        texts.append("task_always_eager: calls run where they are made, one after the other, and no message is sent")
    return [Finding("advice", True, text) for text in texts]


def _options_of(task: Any) -> LockOptions | None:
    try:
        options: LockOptions = task.lock_options
    except ConfigurationError:
        # Another check has told of that.
        return None
    return options


def _about_limits(app: Celery, tasks: Tasks) -> Iterator[str]:
    endless = sorted(name for name, (task, _) in tasks.items() if _limit_of(app, task) is None)
    if endless:
        yield f"no time limit, so a body that hangs keeps its lock for ever: {a_few(endless)}"
    if not _broker_of(app).startswith(_DELIVER_AGAIN):
        return
    longer = sorted(
        name
        for name, (task, options) in tasks.items()
        if task.acks_late and (_limit_of(app, task) or 0.0) > options.visibility_timeout
    )
    if longer:
        yield (
            "acks_late and a time limit above the visibility timeout of the broker, so a message may be delivered "
            f"again while it runs; the copy waits: {a_few(longer)}"
        )


def _broker_of(app: Celery) -> str:
    urls = app.conf.broker_read_url or app.conf.broker_url or ""
    return urls if isinstance(urls, str) else str([*urls, ""][0])


def _limit_of(app: Celery, task: Any) -> float | None:
    conf = app.conf
    limits = task.time_limit, task.soft_time_limit, conf.task_time_limit, conf.task_soft_time_limit
    return next((float(limit) for limit in limits if limit), None)


def _about_waiting(tasks: Tasks, workers: Workers) -> Iterator[str]:
    waiting = sorted(name for name, (_, options) in tasks.items() if options.on_conflict == "wait")
    slots = sum(workers.slots.values())
    if waiting and 0 < slots <= _FEW_SLOTS:
        yield (
            f"lock_on_conflict='wait' keeps a slot while it waits, and the workers have {slots} of them; "
            f"think of 'reschedule': {a_few(waiting)}"
        )


def _about_names(known: set[str], names: Iterable[str]) -> Iterator[str]:
    others = sorted({name for name in names if name not in known and not name.startswith("celery.beat.")})
    if others:
        yield (
            "locks in the store whose names no task of this app has, so they are of a Lock, or of another app with "
            f"the same singleton_lock_prefix: {a_few(others)}"
        )
