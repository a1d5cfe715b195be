"""What we listen to."""

from typing import Any

from celery.signals import task_postrun, task_prerun, worker_init

from celery_singleton_lock.request import LostAcknowledgements
from celery_singleton_lock.runs.redelivery import keep_result
from celery_singleton_lock.task import SingletonTask


@worker_init.connect(weak=False)
def watch_the_connection(sender: Any = None, **_: Any) -> None:
    """Learn of a connection that is lost with the acknowledgements that were under way."""
    sender.app.steps["consumer"].add(LostAcknowledgements)


@task_prerun.connect(weak=False)
def before_started_is_stored(task: Any = None, **_: Any) -> None:
    """Keep the result that a later delivery of the message finds, because Celery stores STARTED next."""
    if isinstance(task, SingletonTask) and task.is_lockable():
        keep_result(task)


@task_postrun.connect(weak=False)
def leave_nothing(task: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    """Release what is still held, on the paths where Celery calls no `after_return`.

    It is the only hook sent for every outcome in which the process still runs
    Python: retry, Ignore, Reject, replace and SystemExit included.
    """
    if isinstance(task, SingletonTask):
        task.leave_nothing(state, retval)
