"""Ending with the result of somebody else's run."""

import random
from typing import Any, NoReturn

from billiard.exceptions import WorkerLostError
from celery import states

from celery_singleton_lock.policies.base import Ended, Policy
from celery_singleton_lock.policies.reschedule import pace
from celery_singleton_lock.runs.results import has_result, was_handed_on
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Holder

# A lease is released before the result is stored. If it is still missing so
# much later, there will be none: the holder has died, or keeps no results.
_RESULT_GRACE = 1.5
_LONGEST_DELAY = 1.0


class Join(Policy):
    """`join`: the holder's result or error is the run's as well."""

    comes_again = True

    def arrive(self, run: Run) -> Ended | None:
        """Take the result of the run that was joined, if that has ended."""
        joins = run.notes.joins
        return _result_of(run, joins) if joins else None

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """Join the holder."""
        holder = conflict.first
        joins = holder.task_id if has_result(run.task, holder) else ""
        _come_again(run, holder, max(_LONGEST_DELAY, pace(conflict)[1] / 2), joins=joins, free_since=0)


def _result_of(run: Run, joins: str) -> Ended | None:
    result = run.task.AsyncResult(joins)
    state = result.state
    if state == states.SUCCESS:
        return Ended(result.result)
    if state == states.REVOKED:
        run.revoke(f"lock key={run.key}: task_id={joins}, which this run had joined, was revoked")
        return Ended()
    if state in states.EXCEPTION_STATES and state != states.RETRY:
        if isinstance(result.result, WorkerLostError):
            return None
        return Ended(error=result.result)
    _wait_for_it(run, joins, state)
    return None


def _wait_for_it(run: Run, joins: str, state: str) -> None:
    """Come again, unless the run that was joined has died: it has had no lock for too long."""
    for holder in run.store.holders(run.key):
        if holder.task_id == joins:
            _come_again(run, holder, _LONGEST_DELAY, joins=joins, free_since=0)
    # Its retry, or the tasks it was handed on to, may end much later; but a message that is lost never comes.
    goes_on = state == states.RETRY or was_handed_on(run.task, joins)
    patience = run.options.queue_ttl if goes_on else _RESULT_GRACE
    # By the clock of the store, because each host that it comes to has its own.
    now = run.store.now()
    free_since = run.notes.free_since or now
    if now - free_since < patience * 1_000_000:
        _come_again(run, Holder.former(run.key, joins), _LONGEST_DELAY, joins=joins, free_since=free_since)


def _come_again(run: Run, holder: Holder, longest: float, **notes: Any) -> NoReturn:
    run.tell(holder, "joined")
    delay = run.delay(random.uniform(0.5, 1.0) * longest, longest)
    run.retry(run.held_by(holder), delay, crowds=True, **notes)
