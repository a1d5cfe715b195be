"""The signals of Celery that the library listens to."""

from contextlib import suppress
from typing import Any

from celery.bootsteps import Step
from celery.signals import beat_init, task_rejected, task_unknown, worker_init, worker_process_shutdown
from celery.utils.imports import load_extension_class_names, symbol_by_name

from celery_singleton_lock.leases.heartbeat import hand_over_counts
from celery_singleton_lock.lost_connection import LostConnection
from celery_singleton_lock.runs.marks import unmark_unread
from celery_singleton_lock.runs.waiting import remember_limits
from celery_singleton_lock.start import check_definitions, check_worker


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
        # Celery itself reports this.
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
    """End the marks of a call that ends before it is a request, because its task or its content is not known here."""
    # The consumer must go on, for any content of a message.
    with suppress(Exception):
        unmark_unread(sender.app, message.headers)


@worker_process_shutdown.connect(weak=False)
def hand_over_what_was_counted(**_: Any) -> None:
    """Leave nothing uncounted: a pool process ends without the usual end of an interpreter."""
    hand_over_counts()
