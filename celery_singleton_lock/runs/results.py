"""Results of other runs: which of them can be read, and the notes that a run leaves for calls that have joined it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery import Task, states
from celery.exceptions import Ignore, Retry

from celery_singleton_lock.definition import why_unreadable
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Holder

logger = logging.getLogger("celery_singleton_lock")

TASKS_OF_ITEMS = ("celery.map", "celery.starmap")
"""The tasks that call the items of `map`, `starmap` and `chunks`. Their result is that of all items together."""

_IN_NAMES_OF_WORKERS = "@"


def has_result(task: Task, holder: Holder) -> bool:
    """The result backend has the result of the holder's run under its task id, and every process can read it."""
    is_lock, is_item = holder.task_id is None, holder.task_name in TASKS_OF_ITEMS
    # The store does not know the task name of a waiter, so it may be an item.
    is_waiter = holder.token and not holder.fence
    is_eager = holder.hostname is not None and _IN_NAMES_OF_WORKERS not in holder.hostname
    if is_lock or is_item or is_waiter or is_eager:
        return False
    return not why_unreadable(task.app.tasks.get(holder.task_name, task))


def end_of(task: Task, task_id: str) -> dict[str, Any] | None:
    """The stored end of the call, if it has ended and its result can be read."""
    if why_unreadable(task):
        return None
    try:
        kept: dict[str, Any] = task.backend.get_task_meta(task_id)
    except Exception:  # noqa: BLE001 (whatever a backend raises)
        return None
    return kept if kept.get("status") in states.READY_STATES else None


def store_end(task: Task, task_id: str, request: Any, kept: Mapping[str, Any]) -> None:
    """Store again what `end_of` has found."""
    traceback = kept.get("traceback")
    task.backend.store_result(task_id, kept["result"], kept["status"], traceback=traceback, request=request)


@contextmanager
def handing_on(run: Run) -> Iterator[None]:
    """Tell the calls that have joined the run that the messages published inside continue it, and may hold no lock."""
    try:
        yield
    except (Ignore, Retry):
        # The message was published: `replace()` and `retry()` end by raising these.
        tell_handed_on(run)
        raise
    tell_handed_on(run)


def tell_handed_on(run: Run) -> None:
    """Tell the calls that have joined the run that its retry, or the tasks of `replace()`, continue it."""
    if _may_be_joined(run.task) and run.can_come_again and not (run.request.ignore_result or why_unreadable(run.task)):
        # Under another id than its result, because the last of those tasks stores its own states there.
        try:
            # STARTED may be overwritten: a later run of the call writes this again, with its own fence.
            run.task.backend.store_result(_word_of(run.task_id), run.lease.fence, states.STARTED)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises)
            # Then those calls ask for the lock themselves, sooner than they need to.
            logger.warning("lock.unstored key=%s task_id=%s: %s", run.key, run.task_id, error)


def _may_be_joined(task: Task) -> bool:
    """There may be joiners: this app knows which of its tasks have that policy and a lock of this name."""
    if task.lock_name is not None:
        return True
    tasks = [each for each in task.app.tasks.values() if getattr(each, "lock_options", None) is not None]
    return any(each.lock_options.on_conflict == "join" and task.name in (each.lock_name, each.name) for each in tasks)


def fence_handed_on(task: Task, task_id: str) -> int:
    """The fence of the last run of this call that went on by a retry, or by the tasks of `replace()`; 0 if none did."""
    # A later run writes it again, so do not read it from a cache.
    word = task.backend.get_task_meta(_word_of(task_id), cache=False)
    return int(word["result"] or 0) if word["status"] == states.STARTED else 0


def _word_of(task_id: str) -> str:
    return f"{task_id}-handed-on"
