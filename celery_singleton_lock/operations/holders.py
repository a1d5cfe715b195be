"""The holders of locks, and what their workers say of them."""

from collections import Counter

from celery_singleton_lock.operations.finding import Finding, a_few
from celery_singleton_lock.operations.inventory import Locks
from celery_singleton_lock.operations.workers import Workers
from celery_singleton_lock.stores.inventory import Survey
from celery_singleton_lock.stores.records import Holder


def about_holders(locks: Locks, before: list[Survey], workers: Workers) -> Finding:
    """Who is alive, as far as the workers that have answered can tell; nobody is judged, and nothing is freed.

    Arguments:
        locks: The locks.
        before: What was known of them before the workers were asked.
        workers: What those have answered.

    Raises:
        StoreError: No answer in time.
    """
    found = {holder.token: _state_of(holder, workers) for survey in before for holder in _holding(survey)}
    doubtful = [survey.key for survey in before if any(found[each.token] == "idle" for each in _holding(survey))]
    # Who has ended meanwhile was alive before.
    left = {each.token: each for key in doubtful for each in _holding(locks.survey(key))}
    idle = [left[token] for token, state in found.items() if state == "idle" and token in left]
    count = Counter(state for state in found.values() if state != "idle")
    told = [f"{count[state]} {words}" for state, words in _WORDS.items() if count[state]]
    if idle:
        told.append(f"not active on a worker that has answered: {a_few([_told(each) for each in idle])}")
    return Finding("holders", None if count["silent"] else True, "; ".join(told) or "nobody holds a lock")


_WORDS = {
    "alive": "alive",
    "silent": "on workers that have not answered",
    "no task": "not of tasks, so no worker knows of them",
}


def _holding(survey: Survey) -> list[Holder]:
    return [holder for holder in survey.holders if not holder.is_on_hold]


def _state_of(holder: Holder, workers: Workers) -> str:
    if holder.task_id is None:
        return "no task"
    active = workers.active.get(holder.hostname or "")
    if active is None:
        return "silent"
    return "alive" if holder.task_id in active else "idle"


def _told(holder: Holder) -> str:
    return f"task_id={holder.task_id} on {holder.hostname} (free in {holder.expires_in:.1f} s unless it is renewed)"
