"""What we listen to."""

from contextlib import suppress
from typing import Any

from celery.bootsteps import Step
from celery.signals import beat_init, task_postrun, task_prerun, task_rejected, task_unknown, worker_init
from celery.utils.imports import load_extension_class_names, symbol_by_name

from celery_singleton_lock.lost_connection import LostConnection
from celery_singleton_lock.runs.marks import unmark_unread
from celery_singleton_lock.runs.redelivery import keep_result
from celery_singleton_lock.runs.waiting import remember_limits
from celery_singleton_lock.start import check_definitions, check_worker
from celery_singleton_lock.task import SingletonTask


class Start(Step):
    """A step of the worker, which can end it before its pool starts; what a handler raises ends nothing.

    A beat inside starts later, in a process or a thread whose end does not end the worker.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, beat: bool = False, **kwargs: Any) -> None:
        check_worker(worker.app, worker.pool_cls, *(_questions_of_beat(worker) if beat else ()))
        super().__init__(worker, beat=beat, **kwargs)


def _questions_of_beat(worker: Any) -> tuple[Any, ...]:
    from celery_singleton_lock.beat import SingletonSchedulerMixin, questions_of  # noqa: PLC0415 (only beats need it)

    aliases = dict(load_extension_class_names("celery.beat_schedulers"))
    try:
        scheduler = symbol_by_name(worker.scheduler, aliases)
    except (ImportError, AttributeError):
        # For Celery to tell.
        return ()
    return questions_of(worker.app) if issubclass(scheduler, SingletonSchedulerMixin) else ()


@worker_init.connect(weak=False)
def add_our_steps(sender: Any = None, **_: Any) -> None:
    """Refuse to start with what cannot work, and learn of a connection that is lost with acknowledgements under way."""
    remember_limits(sender)
    sender.app.steps["worker"].add(Start)
    sender.app.steps["consumer"].add(LostConnection)


@beat_init.connect(weak=False)
def check_before_the_first_tick(sender: Any = None, **_: Any) -> None:
    """Refuse to start a beat with what cannot work."""
    from celery_singleton_lock.beat import SingletonSchedulerMixin  # noqa: PLC0415 (of no use but in a beat)

    if isinstance(sender.scheduler, SingletonSchedulerMixin):
        sender.scheduler.check()
    else:
        check_definitions(sender.app)


@task_unknown.connect(weak=False)
@task_rejected.connect(weak=False)
def queued_no_more(sender: Any = None, message: Any = None, **_: Any) -> None:
    """End what a call has left that ends before it is a request: its task or its content is not known here."""
    # Whatever the message carries, the consumer goes on.
    with suppress(Exception):
        unmark_unread(sender.app, message.headers)


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
