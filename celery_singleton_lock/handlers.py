"""The signals of Celery that the library listens to."""

from contextlib import suppress
from typing import Any

from celery.signals import beat_init, task_rejected, task_unknown, worker_init, worker_process_shutdown

from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.runs.marks import unmark_unread
from celery_singleton_lock.runs.policies import remember_limits
from celery_singleton_lock.start import check_definitions


@worker_init.connect(weak=False)
def add_our_steps(sender: Any = None, **_: Any) -> None:
    """Refuse to start with what cannot work, and keep what runs if the connection to the broker is lost."""
    from celery_singleton_lock.worker import LostConnection, Start  # noqa: PLC0415 (of no use but in a worker)

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
    counters.flush()
