"""Coming again, until the key is free."""

from typing import Any, NoReturn

from celery_singleton_lock.policies.base import Policy
from celery_singleton_lock.policies.skip import refuse
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict

FIRST_DELAY = 0.25
# If few calls come again for a key, each comes often enough to take it soon after it is free.
LIGHT_LOAD_DELAY = 2.0
PACE_OF_THE_NEXT = FIRST_DELAY, LIGHT_LOAD_DELAY
# The number of calls a second that come again for one key, all together.
ARRIVALS_PER_SECOND = 50


class Reschedule(Policy):
    """`reschedule`: back to the broker, as often as it takes."""

    comes_again = True

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """Come again, unless it has waited long enough."""
        if is_out_of_patience(run, conflict):
            refuse(run, conflict.first)
        come_again(run, conflict)


def come_again(run: Run, conflict: Conflict, **notes: Any) -> NoReturn:
    """Go back to the broker; the larger the crowd, the longer for each."""
    holder = conflict.first
    run.tell(holder, "rescheduled")
    is_next = conflict.successor == run.task_id or notes.get("asked")
    delay = run.delay(*(PACE_OF_THE_NEXT if is_next else pace(conflict.crowd)), holder.expires_in)
    run.retry(run.held_by(holder), delay, since=run.lease.refused_at, crowds=run.is_in_crowd, **notes)


def pace(crowd: int) -> tuple[float, float]:
    """The first delay and the longest, in seconds."""
    share = crowd / ARRIVALS_PER_SECOND
    return max(FIRST_DELAY, share), max(LIGHT_LOAD_DELAY, share)


def is_out_of_patience(run: Run, conflict: Conflict) -> bool:
    """By the store's clock, its wait would be longer than `lock_wait_timeout` when it comes again."""
    return patience(run, conflict) < FIRST_DELAY


def patience(run: Run, conflict: Conflict) -> float:
    """Seconds until it has waited for `lock_wait_timeout`, counted from its first refusal."""
    waited = (conflict.at - run.lease.refused_at) / 1_000_000
    return float("inf") if run.options.wait_timeout is None else run.options.wait_timeout - waited
