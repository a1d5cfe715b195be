"""Results of other runs: which can be read, and what a run leaves for those who wait for its own."""

from celery import Task, states

from celery_singleton_lock.definition import why_unreadable
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Holder

TASKS_OF_ITEMS = ("celery.map", "celery.starmap")
"""What calls the items of `map`, `starmap` and `chunks`. Its result is that of all items together."""

_IN_NAMES_OF_WORKERS = "@"


def has_result(task: Task, holder: Holder) -> bool:
    """What is stored under the holder's task id is the result of its run, and everybody can read it."""
    is_lock, is_item = holder.task_id is None, holder.task_name in TASKS_OF_ITEMS
    # Of a waiter no name is known, so it may be an item.
    is_waiter = holder.token and not holder.fence
    is_eager = holder.hostname is not None and _IN_NAMES_OF_WORKERS not in holder.hostname
    if is_lock or is_item or is_waiter or is_eager:
        return False
    return not why_unreadable(task.app.tasks.get(holder.task_name, task))


def tell_handed_on(run: Run) -> None:
    """Let those who have joined the run know that the tasks of `replace()` go on for it, which may hold no lock."""
    may_be_joined = run.options.on_conflict == "join" or run.task.lock_name is not None
    if may_be_joined and run.can_come_again and not (run.request.ignore_result or why_unreadable(run.task)):
        # Beside its result, because the last of those tasks stores its own states there.
        run.task.backend.store_result(_word_of(run.task_id), None, states.SUCCESS)


def was_handed_on(task: Task, task_id: str) -> bool:
    """The tasks of `replace()` go on for this run, or have ended."""
    return bool(task.backend.get_state(_word_of(task_id)) == states.SUCCESS)


def _word_of(task_id: str) -> str:
    return f"{task_id}-handed-on"
