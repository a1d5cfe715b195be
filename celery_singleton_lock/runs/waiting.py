"""Waiting in place: how long a run may wait while its time limit goes on, and who is told of it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from billiard import current_process
from celery import Task
from celery._state import get_current_task

from celery_singleton_lock.leases.greenlets import patched_by
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Holder

logger = logging.getLogger("celery_singleton_lock")

# The part of a time limit that a run may wait; the rest is for the body.
_SHARE = 1 / 4

Limits = tuple[float | None, float | None]

_of_the_worker: Limits = None, None


def remember_limits(worker: Any) -> None:
    """Keep the limits of the command line; the pool's processes are forks of this one, and are not told of it."""
    global _of_the_worker  # noqa: PLW0603 (a process has one)
    _of_the_worker = worker.time_limit, worker.soft_time_limit


def longest_wait(run: Run) -> float:
    """Seconds for which the run may still wait in its place; infinite if no time limit ends it there."""
    timed = _timed(run)
    known = _limits_of(timed)
    if known == (None, None):
        return float("inf")
    limits = [limit for limit in _enforced(known) if limit]
    if not limits or timed.request.is_eager:
        return float("inf")
    return min(limits) * _SHARE - _spent(timed) - run.age


@contextmanager
def waiting_in_place(run: Run, holder: Holder) -> Iterator[None]:
    """Say that the run waits, and that it waits no longer if it is granted its key; count the time."""
    logger.info("lock.waiting key=%s task_id=%s holder=%s", run.key, run.task_id, holder.task_id)
    run.send_event("lock-waiting", key=run.key, holder=holder.task_id)
    try:
        yield
    finally:
        timed = _timed(run)
        timed.request.lock_waited = _spent(timed) + run.age
    if run.lease.granted:
        run.send_event("lock-acquired", key=run.key, waited=run.lease.waited)


def _timed(run: Run) -> Task:
    """The task whose time limit goes on: for an item, its map."""
    return get_current_task() if run.is_item else run.task


def _spent(timed: Task) -> float:
    """Seconds for which items before this one have waited."""
    return timed.request.get("lock_waited") or 0.0


def _limits_of(timed: Task) -> Limits:
    """The hard time limit and the soft one, each chosen as a worker chooses it."""
    hard, soft = timed.request.timelimit or (None, None)
    hard = hard or timed.time_limit or _of_the_worker[0]
    soft = soft or timed.soft_time_limit or _of_the_worker[1]
    return hard, soft


def _enforced(limits: Limits) -> tuple[float | None, ...]:
    """The limits that the pool enforces: prefork both, gevent the hard one, all others none."""
    # Only the pool processes of prefork are daemons.
    if current_process().daemon:
        return limits
    patched = patched_by()
    return limits[:1] if patched is not None and patched.__name__ == "gevent" else ()
