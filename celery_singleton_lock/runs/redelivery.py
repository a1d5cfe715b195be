"""Messages that are delivered more than once: one body each.

While the run lives, the store refuses a later delivery, which waits without a trace. Once the run has ended, a later
delivery is dropped. The run leaves a done marker as it releases, but only if another delivery is known or likely: a
message that was delivered again may be delivered once more, or its first delivery may still wait in a busy worker.
"""

import logging
from functools import partial
from typing import Literal

from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.leases.holding import NEW, RELEASED
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.delivery import (
    CAN_BE_REQUEUED,
    FIRST,
    is_long_here,
    redelivered_within,
    was_delivered_before,
)
from celery_singleton_lock.runs.policies import Refused
from celery_singleton_lock.runs.requeue import CONTINUED, COPY, delay_of
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Conflict, Done, Ending, Holder


def refused_copy(run: Run, answer: Conflict | Done) -> Refused:
    """What becomes of a delivery whose message has a run already: it is parked until that run ends, or dropped.

    Either way it leaves no trace in the result, which is that of the other delivery.
    """
    if isinstance(answer, Conflict):
        holder, expires_in = answer.first, answer.first.expires_in
    else:
        holder, expires_in = Holder.former(run.key, run.task_id, answer.attempt), float("inf")
        if answer.outcome != "ended":
            return Refused("dropped", holder)
        # Its result is about to be stored; if its process has died in between, this delivery runs.
    is_next_attempt = (run.request.retries or 0) > holder.attempt or run.is_later_attempt
    return Refused("parked", holder, delay=delay_of(run, CONTINUED if is_next_attempt else COPY, expires_in))


def ending_of(run: Run, error: Exception | None) -> Ending | None:
    """The facts for later deliveries about a body that has ended this way; None if they should run it again."""
    if run.way not in CAN_BE_REQUEUED or run.lease.state in (NEW, RELEASED):
        return None
    outcome = "ended" if error is None else _outcome_of(run.task, error)
    if outcome is None:
        return None
    options = run.options
    is_due = is_long_here(run.delivery, options, late=run.task.acks_late)
    if run.way is not FIRST:
        # It may be a copy.
        is_due = is_due or was_delivered_before(run.request, run.notes)
    return Ending(outcome, redelivered_within(options), is_due)


def _outcome_of(task: Task, error: Exception) -> Literal["ended", "retried"] | None:
    if isinstance(error, Reject):
        # With requeue the message is meant to be redelivered.
        return None if error.requeue else "retried"
    if isinstance(error, Ignore | Retry):
        # For Ignore, nothing is stored, or a replacement goes on with the work.
        return "retried"
    # Celery 5.7 has an option for failures alone. If it is not set, the older option counts.
    is_acknowledged = getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout)
    return None if task.acks_late and not is_acknowledged else "ended"


def mark_stored(run: Run) -> None:
    """Say that the result is stored, if later deliveries look for it; in the background if the store is silent."""
    ending = run.lease.ending
    if ending is None or ending.outcome != "ended":
        return
    run.lease.ending = None
    claim = run.claim
    mark = partial(run.store.mark_done, run.key, claim.marker, claim.facts.attempt, "stored", ending.kept)
    if ending.marker == "left":
        try:
            mark()
            return
        except StoreError as error:
            text = "until it is written in the background, a copy of this message may run: %s"
            log.write(logging.WARNING, "lock.done_marker_failed", text, error, key=run.key, task_id=run.task_id)
    background.submit(PendingRelease(run.store, run.key, run.task_id, clock() + ending.kept, mark))
