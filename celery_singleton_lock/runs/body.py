"""What holds while the body of a run goes on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from celery_singleton_lock import signals
from celery_singleton_lock.leases.current import running_under
from celery_singleton_lock.runs.redelivery import telling_later_deliveries
from celery_singleton_lock.runs.replaced import making_way
from celery_singleton_lock.runs.run import Run

logger = logging.getLogger("celery_singleton_lock")


@contextmanager
def body_of(run: Run) -> Iterator[None]:
    """Run the body inside: interrupted if its lease is lost, and found by later deliveries of its message."""
    run.begins()
    if run.is_unlocked:
        with telling_later_deliveries(run):
            yield
        return
    signals.lock_acquired.send(sender=run.task, lease=run.lease)
    with making_way(run), telling_later_deliveries(run), running_under(run.lease), run.interrupt.allowed():
        yield
    _tell_if_outlived(run)


def _tell_if_outlived(run: Run) -> None:
    """Say that a body has ended well without its lock: it was only to be warned, or has caught the error."""
    # A run that was told to make way keeps its lease until it has ended.
    if run.lease.lost and run.lease.lost_reason != "replaced":
        event = "lock.outlived key=%s task_id=%s reason=%s: the body has lost its lock and gone on to its end"
        logger.error(event, run.key, run.task_id, run.lease.lost_reason)
