"""The body of a run, and the things that are in force while it runs."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Task

from celery_singleton_lock import signals
from celery_singleton_lock.errors import MAKES_WAY, LockLost
from celery_singleton_lock.leases.current import running_under
from celery_singleton_lock.leases.heartbeat import count, count_grant
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.runs.redelivery import ending_of
from celery_singleton_lock.runs.replaced import end_as_replaced, has_made_way
from celery_singleton_lock.runs.run import Run

logger = logging.getLogger("celery_singleton_lock")


def run_body(run: Run, body: Callable[..., Any]) -> Any:
    """Call the body: interrupted if its lease is lost, and found by later deliveries of its message.

    Raises:
        Exception: The body's; or `Revoked` if the run was told to make way, even if its body has caught that.
    """
    run.begins()
    try:
        result = body(*run.args, **run.kwargs) if run.is_unlocked else _under_its_lease(run, body)
    except Exception as error:
        run.ending = ending_of(run, error)
        if not has_made_way(run, error):
            raise
    else:
        run.ending = ending_of(run, None)
        if not has_made_way(run, None):
            _tell_if_outlived(run)
            return result
    end_as_replaced(run)
    return None


def _under_its_lease(run: Run, body: Callable[..., Any]) -> Any:
    lease = run.lease
    count_grant(lease.store, lease.key, run.task.name, waited=lease.waited, took_over=lease.took_over)
    lease.on_released = partial(_tell_released, run.task)
    if signals.lock_acquired.receivers:
        signals.lock_acquired.send(sender=run.task, lease=lease)
    with running_under(run.lease), run.interrupt.allowed():
        # Before this point, nobody could be told of a loss.
        if run.lease.lost and run.options.on_lost != "warn":
            raise LockLost(run.key, run.lease.lost_reason or "expired")
        return body(*run.args, **run.kwargs)


def _tell_released(task: Task, lease: Lease) -> None:
    count(lease.store, lease.key, "held", task.name, value=lease.age)
    if signals.lock_released.receivers:
        signals.lock_released.send(sender=task, lease=lease)


def _tell_if_outlived(run: Run) -> None:
    """Log that a body has ended well without its lock: it was only to be warned, or it has caught the error."""
    # A run that was told to make way keeps its lease until it has ended.
    if run.lease.lost and run.lease.lost_reason not in MAKES_WAY and not run.is_unlocked:
        event = "lock.outlived key=%s task_id=%s reason=%s: the body has lost its lock and gone on to its end"
        logger.error(event, run.key, run.task_id, run.lease.lost_reason)
