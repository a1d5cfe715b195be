"""Ending with the result of another run."""

import random
from typing import Any, NoReturn

from billiard.exceptions import WorkerLostError
from celery import states

from celery_singleton_lock.policies.base import Ended, Policy
from celery_singleton_lock.policies.reschedule import pace
from celery_singleton_lock.runs.results import fence_handed_on, has_result
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Holder, Look

# A lease is released before the result is stored. If it is still missing so
# much later, there will be none: the holder has died, or keeps no results.
_RESULT_GRACE = 1.5
# While few join, they end within two seconds of the holder.
_LIGHT_LOAD_DELAY = 1.0
_JOINS_NOBODY = {"joins": "", "joins_fence": 0, "free_since": 0}


class Join(Policy):
    """`join`: the holder's result or error is the run's as well."""

    comes_again = True

    def arrive(self, run: Run) -> Ended | None:
        """Take the result of the run that was joined, if that has ended."""
        joins = run.notes.joins
        if not joins:
            return None
        seen = run.store.look(run.key)
        for holder in seen.holders:
            if holder.task_id == joins and not holder.is_on_hold:
                _come_again(run, holder, _longest_delay(seen.crowd), **_joining(holder))
        # Only now: if a task id is used again, the result of an earlier run is there while this run holds the lock.
        return _result_of(run, joins, seen)

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """Join the holder."""
        holder = conflict.first
        joining = _joining(holder, conflict.at) if has_result(run.task, holder) else _JOINS_NOBODY
        _come_again(run, holder, _longest_delay(conflict.crowd), **joining)


def _joining(holder: Holder, at: int = 0) -> dict[str, Any]:
    # A run that has not begun has no fence yet; its fence will be greater than the time of the store now.
    return {"joins": holder.task_id, "joins_fence": holder.fence or at, "free_since": 0}


def _result_of(run: Run, joins: str, seen: Look) -> Ended | None:
    result = run.task.AsyncResult(joins)
    state = result.state
    if state == states.SUCCESS:
        return Ended(result.result)
    if state == states.REVOKED:
        run.revoke(f"lock key={run.key}: task_id={joins}, which this run had joined, was revoked", "joined", joins)
        return Ended()
    if state == states.FAILURE:
        if isinstance(result.result, WorkerLostError):
            return None
        return Ended(error=result.result)
    _wait_for_it(run, joins, seen)
    return None


def _wait_for_it(run: Run, joins: str, seen: Look) -> None:
    """Come again, unless the run that was joined counts as dead: it has had no lock for too long."""
    # The retry of that run, or the tasks that continue it, may end much later, but a message that is lost never
    # comes. A state that an earlier run with the same task id has left says nothing about this run.
    goes_on = 0 < run.notes.joins_fence <= fence_handed_on(run.task, joins)
    patience = run.options.queue_ttl if goes_on else _RESULT_GRACE
    # Measured by the clock of the store, because the call may come to another host, with another clock, each time.
    free_since = run.notes.free_since or seen.at
    if seen.at - free_since < patience * 1_000_000:
        former = Holder.former(run.key, joins)
        _come_again(run, former, _longest_delay(seen.crowd), free_since=free_since)


def _longest_delay(crowd: int) -> float:
    return max(_LIGHT_LOAD_DELAY, pace(crowd)[1] / 2)


def _come_again(run: Run, holder: Holder, longest: float, **notes: Any) -> NoReturn:
    run.tell(holder, "joined")
    delay = run.delay(random.uniform(0.5, 1.0) * longest, longest)
    run.retry(run.held_by(holder), delay, crowds=True, **notes)
