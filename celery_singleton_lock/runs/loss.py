"""The fate of a run that loses its lease while its body goes on."""

import os
import signal
from functools import partial

from billiard import current_process
from celery import Task

from celery_singleton_lock import signals
from celery_singleton_lock.errors import MAKES_WAY, ConfigurationError, LockLost
from celery_singleton_lock.leases.deadman import DeadMan
from celery_singleton_lock.leases.heartbeat import count
from celery_singleton_lock.leases.interrupt import Interrupt
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.leases.teller import teller
from celery_singleton_lock.options import LockOptions


def deadman_for(task: Task, options: LockOptions) -> DeadMan | None:
    """The timer that kills this process at the deadline, if the task's `lock_on_lost` is `kill`; else None.

    Raises:
        ConfigurationError: This process is not a pool process, so nothing would replace it.
    """
    # The children of a prefork pool are daemons, and nothing else is.
    return DeadMan() if wants_to_be_killed(task, options, has_process=current_process().daemon) else None


def wants_to_be_killed(task: Task, options: LockOptions, *, has_process: bool) -> bool:
    """The task's `lock_on_lost` is `kill`.

    Raises:
        ConfigurationError: It is, and no run of the task has a process of its own.
    """
    if options.on_lost != "kill" or options.mode == "until_executing":
        return False
    if not has_process:
        raise ConfigurationError(
            f"task {task.name}: lock_on_lost='kill' needs a process to kill, which only the prefork pool has; "
            "run the worker with --pool prefork, or use 'abort'"
        )
    return True


def tell_lost(task: Task, options: LockOptions, interrupt: Interrupt, lease: Lease) -> None:
    """End the body, or let it run on, as the task's `lock_on_lost` says; then have `lock_lost` sent."""
    policy, reason = options.on_lost, lease.lost_reason or "expired"
    count(lease.store, lease.key, "lost", task.name, reason)
    # A holder that is asked to make way still has its lease, so it has time to end in order.
    if policy == "kill" and reason not in MAKES_WAY:
        os.kill(os.getpid(), signal.SIGKILL)
    if policy != "warn":
        interrupt.send(LockLost(lease.key, reason))
    teller.tell(partial(signals.lock_lost.send, sender=task, lease=lease, reason=reason))
