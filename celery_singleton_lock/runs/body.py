"""What holds while the body of a run goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

from celery_singleton_lock import signals
from celery_singleton_lock.leases.current import running_under
from celery_singleton_lock.runs.redelivery import telling_later_deliveries
from celery_singleton_lock.runs.replaced import making_way
from celery_singleton_lock.runs.run import Run


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
