"""The holders of locks, and the answers of their workers about them."""

from collections import Counter

from celery_singleton_lock.operations.finding import Finding, a_few
from celery_singleton_lock.operations.inventory import Locks
from celery_singleton_lock.operations.workers import Workers
from celery_singleton_lock.stores.inventory import Survey
from celery_singleton_lock.stores.records import Holder


def about_holders(locks: Locks, before: list[Survey], workers: Workers) -> Finding:
    """The holders that are alive, as far as the workers that have answered can tell; no verdict, and nothing is freed.

    Arguments:
        locks: The locks.
        before: The state of the locks before the workers were asked.
        workers: The answers of the workers.

    Raises:
        StoreError: No answer in time.
    """
    states = [(holder, _state_of(holder, workers)) for survey in before for holder in _holding(survey)]
    doubtful = sorted({holder.key for holder, state in states if state == _IDLE})
    still = {holder.token: holder for survey in locks.store.survey(doubtful) for holder in _holding(survey)}
    # A holder that has ended meanwhile was alive before.
    idle = [still[holder.token] for holder, state in states if state == _IDLE and holder.token in still]
    silent = [holder for holder, state in states if state == _SILENT]
    count = Counter(state for _, state in states)
    told = [f"{count[state]} {state}" for state in (_ALIVE, _NO_TASK) if count[state]]
    told += [f"{state}: {_named(holders)}" for state, holders in ((_SILENT, silent), (_IDLE, idle)) if holders]
    return Finding("holders", None if silent else True, "; ".join(told) or "nobody holds a lock")


_ALIVE, _NO_TASK = "alive", "not of tasks, so no worker knows of them"
_SILENT, _IDLE = "on a worker that has not answered", "not active on a worker that has answered"


def _holding(survey: Survey) -> list[Holder]:
    return [holder for holder in survey.holders if not holder.is_on_hold]


def _state_of(holder: Holder, workers: Workers) -> str:
    if holder.task_id is None:
        return _NO_TASK
    active = workers.active.get(holder.hostname or "")
    if active is None:
        return _SILENT
    return _ALIVE if holder.task_id in active else _IDLE


def _named(holders: list[Holder]) -> str:
    return a_few(
        [
            f"task_id={each.task_id} on {each.hostname} (free in {each.expires_in:.1f} s unless it is renewed)"
            for each in holders
        ]
    )
