"""Receivers of Celery's signals.

A receiver of `task_postrun` would add a tenth to the cost of each lock. So the first task or run that needs the
receiver connects it.
"""

import sys
from contextlib import suppress
from typing import Any

from celery import VERSION, Task
from celery.signals import beat_init, task_postrun, task_rejected, task_unknown, worker_init, worker_process_shutdown

from celery_singleton_lock.checks import check_beat
from celery_singleton_lock.definition.options import Lockable, base_in
from celery_singleton_lock.definition.settings import limits_of_worker
from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.runs.endings import look_after_workflows, unmark_unread, unmark_unstarted
from celery_singleton_lock.runs.message import run_of


def listen_for(task: Task) -> None:
    """Connect the receiver if the task has code of its own before the lock, because that code may end the run."""
    cls = task.__class__
    if cls.before_start is not Task.before_start or cls.__call__ is not base_in(cls).__call__:
        connect_postrun()


def connect_postrun() -> None:
    """From now on, clean up after runs that never reach `__call__`, or leave something to do after it."""
    task_postrun.connect(_after_its_end, weak=False)


def release_at_task_end(task: Task, state: str | None, retval: Any, *, is_interrupted: bool = False) -> None:
    run = run_of(task.request)
    if run is not None:
        run.finish(is_interrupted=is_interrupted)
    else:
        unmark_unstarted(task, state, retval)


def _after_its_end(task: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    # An error that passes through Celery, such as the SystemExit of a cold shutdown, may keep it from storing the end.
    is_interrupted = sys.exc_info()[0] is not None
    try:
        if isinstance(task, Lockable):
            release_at_task_end(task, state, retval, is_interrupted=is_interrupted)
    except BaseException:
        # A signal handler may have raised above, and Celery goes on as if nothing had happened.
        if isinstance(task, Lockable):
            release_at_task_end(task, state, retval, is_interrupted=is_interrupted)
        raise


if VERSION < (5, 7):
    # Before Celery 5.7, a signal that drops a dead receiver gets a new list of receivers. A tracer made before
    # keeps the old list, and calls no receiver that is connected later.
    connect_postrun()


@worker_init.connect(weak=False)
def add_our_steps(sender: Any = None, **_: Any) -> None:
    # Here, because another receiver of this signal may import the tasks.
    limits_of_worker[:] = sender.time_limit, sender.soft_time_limit
    steps = sender.app.steps
    steps["worker"].add(f"{__package__}.worker:Start")
    steps["consumer"].update((f"{__package__}.worker:LostConnection", f"{__package__}.waiting:WaitingMessages"))
    look_after_workflows()


@beat_init.connect(weak=False)
def check_before_the_first_tick(sender: Any = None, **_: Any) -> None:
    from celery_singleton_lock.beat import SingletonSchedulerMixin  # noqa: PLC0415 (of no use but in a beat)

    check_beat(sender.app, has_lease=isinstance(sender.scheduler, SingletonSchedulerMixin))


@task_unknown.connect(weak=False)
@task_rejected.connect(weak=False)
def queued_no_more(sender: Any = None, message: Any = None, **_: Any) -> None:
    # The consumer must go on, whatever a message carries.
    with suppress(Exception):
        unmark_unread(sender.app, message.headers)


@worker_process_shutdown.connect(weak=False)
def hand_over_what_was_counted(**_: Any) -> None:
    # A pool process ends without the handlers of `atexit`.
    counters.flush()
