"""Receivers of Celery's signals.

The receiver of `task_postrun` slows each task. So the first task or run that needs the receiver connects it.
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
    """Connect the receiver of `task_postrun` if the user's `before_start` or `__call__` may end a call before ours."""
    cls = task.__class__
    if cls.before_start is not Task.before_start or cls.__call__ is not base_in(cls).__call__:
        connect_postrun()


def connect_postrun() -> None:
    """From now on, clean up after runs that `__call__` never began or did not finish."""
    task_postrun.connect(_after_its_end, weak=False)


def release_at_task_end(task: Task, state: str | None, retval: Any, *, is_interrupted: bool = False) -> None:
    run = run_of(task.request)
    if run is not None:
        run.finish(is_interrupted=is_interrupted)
    else:
        unmark_unstarted(task, state, retval)


def _after_its_end(task: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    # An error such as SystemExit at a cold shutdown may leave the result unstored.
    is_interrupted = sys.exc_info()[0] is not None
    try:
        if isinstance(task, Lockable):
            release_at_task_end(task, state, retval, is_interrupted=is_interrupted)
    except BaseException:
        # A signal handler may have raised above, and Celery would only log the error: try once more.
        if isinstance(task, Lockable):
            release_at_task_end(task, state, retval, is_interrupted=is_interrupted)
        raise


if VERSION < (5, 7):
    # Before Celery 5.7, a tracer may keep an old list of receivers, and would not call later ones.
    connect_postrun()


@worker_init.connect(weak=False)
def add_our_steps(sender: Any = None, **_: Any) -> None:
    # Add our steps even if no task is locked yet: a later receiver of this signal may import tasks.
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
    # A malformed message must not stop the consumer.
    with suppress(Exception):
        unmark_unread(sender.app, message.headers)


@worker_process_shutdown.connect(weak=False)
def hand_over_what_was_counted(**_: Any) -> None:
    # A pool process runs no `atexit` handlers.
    counters.flush()
