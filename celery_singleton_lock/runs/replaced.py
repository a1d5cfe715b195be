"""What becomes of a run that was replaced by its successor."""

from collections.abc import Iterator
from contextlib import contextmanager

from celery_singleton_lock.errors import LockLost, StoreError
from celery_singleton_lock.runs.message import marker_of
from celery_singleton_lock.runs.run import Run


@contextmanager
def making_way(run: Run) -> Iterator[None]:
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


def _is_own(run: Run, error: Exception) -> bool:
    return isinstance(error, LockLost) and error.key == run.key and error.reason == "replaced"


def _end_as_replaced(run: Run) -> None:
    try:
        successor = run.store.successor(run.key)
        if run.retry_key is not None:
            # It must not come after the run that is newer.
            marker = marker_of(run.retry_key, run.task_id, run.notes.of_the_call())
            run.store.mark_done(marker, run.request.retries + 1, "stored", run.options.queue_ttl)
            run.store.unmark(run.retry_key, run.task_id)
    except StoreError:
        successor = None
    run.revoke(f"lock key={run.key}: replaced by task_id={successor}", "replaced", successor)
