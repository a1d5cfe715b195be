"""The end of a run that was told to make way, for its successor or by a person."""

import logging

from celery_singleton_lock.errors import MAKES_WAY, LockLost, StoreError
from celery_singleton_lock.runs.message import marker_of
from celery_singleton_lock.runs.run import Run

logger = logging.getLogger("celery_singleton_lock")


def has_made_way(run: Run, error: Exception | None) -> bool:
    """The run was told to make way, even if its body has caught that."""
    return run.was_replaced or (isinstance(error, LockLost) and error.key == run.key and error.reason in MAKES_WAY)


def end_as_replaced(run: Run) -> None:
    """End as REVOKED; the result names the successor, or the person who has asked for it."""
    is_broken, successor, by = run.lease.lost_reason == "broken", None, None
    try:
        if is_broken:
            by = run.store.broken_by(run.claim)
        else:
            successor = run.store.successor(run.key) or _one_that_runs_already(run)
        if run.retry_key is not None:
            # A retry must not run after the newer run, or after the end that a person has asked for.
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


def _one_that_runs_already(run: Run) -> str | None:
    """With several places, the successor may have got another place since it has asked for that of this run."""
    later = [holder for holder in run.store.holders(run.key) if holder.task_id and holder.fence > run.lease.fence]
    return max(later, key=lambda holder: holder.fence).task_id if later else None
