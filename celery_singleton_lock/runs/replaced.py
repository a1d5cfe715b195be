"""What becomes of a run that was told to make way: for its successor, or by a person."""

import logging

from celery_singleton_lock.errors import MAKES_WAY, LockLost, StoreError
from celery_singleton_lock.runs.message import marker_of
from celery_singleton_lock.runs.run import Run

logger = logging.getLogger("celery_singleton_lock")


def has_made_way(run: Run, error: Exception | None) -> bool:
    """The run was told to make way, whatever its body has made of that."""
    return run.was_replaced or (isinstance(error, LockLost) and error.key == run.key and error.reason in MAKES_WAY)


def end_as_replaced(run: Run) -> None:
    """End as REVOKED, in favour of the successor, or naming who has asked for it."""
    is_broken, successor, by = run.lease.lost_reason == "broken", None, None
    try:
        if is_broken:
            by = run.store.broken_by(run.claim)
        else:
            successor = run.store.successor(run.key)
        if run.retry_key is not None:
            # It must not come after the run that is newer, or after the end that a person has asked for.
            marker = marker_of(run.retry_key, run.task_id, run.notes.of_the_call())
            run.store.mark_done(marker, run.request.retries + 1, "stored", run.options.queue_ttl)
            run.store.unmark(run.retry_key, run.task_id)
    except StoreError as error:
        logger.warning("lock.unnamed key=%s task_id=%s: %s", run.key, run.task_id, error)
    if is_broken:
        logger.warning("lock.broken key=%s task_id=%s by=%s", run.key, run.task_id, by)
        run.revoke(f"lock key={run.key}: broken by {by}", "broken", None)
    else:
        run.revoke(f"lock key={run.key}: replaced by task_id={successor}", "replaced", successor)
