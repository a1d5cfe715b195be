"""What becomes of a run whose lease is lost while its body goes on."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from billiard import current_process

from celery_singleton_lock import signals
from celery_singleton_lock.conflict import revoke
from celery_singleton_lock.errors import ConfigurationError, LockLost, StoreError
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.leases.interrupt import Interrupt
from celery_singleton_lock.leases.lease import Lease

if TYPE_CHECKING:
    from celery_singleton_lock.task import SingletonTask


def deadman_for(task: "SingletonTask") -> DeadMan | None:
    """The timer that kills this process at the deadline, where the task's `lock_on_lost` is `kill`.

    Raises:
        ConfigurationError: This process is not a pool's to lose.
    """
    if task.lock_options.on_lost != "kill":
        return None
    if not current_process().daemon:  # as the children of a prefork pool are, and nothing else is
        raise ConfigurationError(
            f"task {task.name}: lock_on_lost='kill' needs a process to kill, which only the prefork pool has; "
            "run the worker with --pool prefork, or use 'abort'"
        )
    return DeadMan()


@contextmanager
def making_way(task: "SingletonTask", lease: Lease) -> Iterator[None]:
    """End as REVOKED a body that was told to make way and did, naming its successor."""
    try:
        yield
    except LockLost as lost:
        if lost.key != lease.key or lost.reason != "replaced":
            raise
        try:
            successor = lease.store.successor(lease.key)
        except StoreError:
            successor = None
        revoke(task, f"lock key={lease.key}: this run made way for task_id={successor}")


def tell_lost(task: "SingletonTask", interrupt: Interrupt, lease: Lease) -> None:
    """End the body, or let it run on, as the task's `lock_on_lost` says; then send `lock_lost`."""
    policy, reason = task.lock_options.on_lost, lease.lost_reason or "expired"
    # A holder that is asked to make way still has its lease, so it may end in peace.
    if policy == "kill" and reason != "replaced":
        os.kill(os.getpid(), signal.SIGKILL)
    if policy != "warn":
        interrupt.send(LockLost(lease.key, reason))
    signals.lock_lost.send(sender=task, lease=lease, reason=reason)
