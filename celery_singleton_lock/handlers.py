"""What we listen to."""

from typing import Any

from celery.signals import task_postrun

from celery_singleton_lock.task import SingletonTask


@task_postrun.connect(weak=False)
def release_leftover(task: Any = None, **_: Any) -> None:
    """Release what is still held, on the paths where Celery calls no `after_return`.

    It is the only hook sent for every outcome in which the process still runs
    Python: retry, Ignore, Reject, replace and SystemExit included.
    """
    if isinstance(task, SingletonTask):
        task.release_leftover()
