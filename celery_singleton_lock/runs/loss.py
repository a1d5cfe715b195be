"""What becomes of a run whose lease is lost while its body goes on."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from billiard import current_process
from celery import Task

from celery_singleton_lock import signals
from celery_singleton_lock.errors import ConfigurationError, LockLost, StoreError
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.leases.teller import teller
from celery_singleton_lock.options import LockOptions
from celery_singleton_lock.runs.message import marker_of

if TYPE_CHECKING:
    from celery_singleton_lock.runs.run import Run


def deadman_for(task: Task, options: LockOptions) -> DeadMan | None:
    """The timer that kills this process at the deadline, where the task's `lock_on_lost` is `kill`.

    Raises:
        ConfigurationError: This process is not a pool's to lose.
    """
    if options.on_lost != "kill" or options.mode == "until_executing":
        return None
    if not current_process().daemon:  # as the children of a prefork pool are, and nothing else is
        raise ConfigurationError(
            f"task {task.name}: lock_on_lost='kill' needs a process to kill, which only the prefork pool has; "
            "run the worker with --pool prefork, or use 'abort'"
        )
    return DeadMan()


def tell_lost(run: "Run", lease: Lease) -> None:
    """End the body, or let it run on, as the task's `lock_on_lost` says; then have `lock_lost` sent."""
    policy, reason = run.options.on_lost, lease.lost_reason or "expired"
    if run.is_unlocked:
        return
    # A holder that is asked to make way still has its lease, so it may end in peace.
    if policy == "kill" and reason != "replaced":
        os.kill(os.getpid(), signal.SIGKILL)
    if policy != "warn":
        run.interrupt.send(LockLost(lease.key, reason))
    teller.tell(partial(signals.lock_lost.send, sender=run.task, lease=lease, reason=reason))


@contextmanager
def making_way(run: "Run") -> Iterator[None]:
    """End as REVOKED a run that was told to make way, whatever its body has made of that."""
    try:
        yield
    except Exception as error:
        if not (run.was_replaced or _is_own(run, error)):
            raise
    else:
        if not run.was_replaced:
            return
    _end_as_replaced(run)


def _is_own(run: "Run", error: Exception) -> bool:
    return isinstance(error, LockLost) and error.key == run.key and error.reason == "replaced"


def _end_as_replaced(run: "Run") -> None:
    try:
        successor = run.store.successor(run.key)
        if run.retry_key is not None:
            # It must not come after the run that is newer.
            marker = marker_of(run.retry_key, run.task_id, run.notes)
            run.store.mark_done(marker, run.request.retries + 1, "stored", run.options.queue_ttl)
            run.store.unmark(run.retry_key, run.task_id)
    except StoreError:
        successor = None
    run.revoke(f"lock key={run.key}: replaced by task_id={successor}")
