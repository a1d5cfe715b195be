"""What becomes of a run that was replaced by its successor."""

from celery_singleton_lock.errors import LockLost, StoreError
from celery_singleton_lock.runs.message import marker_of
from celery_singleton_lock.runs.run import Run


def has_made_way(run: Run, error: Exception | None) -> bool:
    """The run was told to make way, whatever its body has made of that."""
    return run.was_replaced or (isinstance(error, LockLost) and error.key == run.key and error.reason == "replaced")


def end_as_replaced(run: Run) -> None:
    """End as REVOKED, in favour of the successor."""
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
