"""Which call runs next, in memory; succeed.lua does the same for Redis."""

from celery_singleton_lock.stores.memory.lock import PATIENCE, Lock, Mark, Merged, Successor, in_force
from celery_singleton_lock.stores.records import Claim, Succession, Turn

Outcome = tuple[Turn, str | None] | None


def rerun(lock: Lock, claim: Claim, task_name: str, arguments: str, memory: float, now: float) -> Outcome:
    """Become the successor, or leave it the arguments, if they are newer."""
    published, successor = _published(claim, now), in_force(lock.successor, now)
    merged, overtaken_by = lock.merged.get(task_name), in_force(lock.overtaken.get(claim.facts.task_id), now)
    if overtaken_by is not None:
        # When it asked, the policy of its task was `replace`.
        return Turn.MERGED, overtaken_by.task_id
    if successor is None or successor.task_id == claim.facts.task_id:
        is_given_up = claim.asked and successor is None
        waiting_at = merged.published if merged and not lock.is_taken(merged, now) else 0.0
        newer = lock.holder_published_after(max(published, waiting_at), now, claim) if is_given_up else None
        if newer is not None:
            return Turn.MERGED, newer
        return _become(lock, claim, "rerun", task_name, published, now)
    if (successor.task_name, successor.policy) != (task_name, "rerun"):
        return Turn.OTHER_TASK, None
    if published > max(merged.published if merged else 0.0, successor.published):
        if not arguments:
            return None
        lock.merged[task_name] = Merged(arguments, published, memory)
    _let_run_in_place_of_others(lock, successor.task_id, now + memory)
    return Turn.MERGED, successor.task_id


def supersede(lock: Lock, claim: Claim, task_name: str, memory: float, now: float) -> Outcome:
    """Become the successor in place of older calls, and have a holder asked to make way."""
    published, mine = _published(claim, now), claim.facts.task_id
    overtaken_by = in_force(lock.overtaken.get(mine), now)
    if overtaken_by is not None:
        return Turn.MERGED, overtaken_by.task_id
    other = lock.successor if lock.successor is not None and lock.successor.task_id != mine else None
    if other is not None and in_force(other, now) and other.published >= published:
        _let_run_in_place_of_others(lock, other.task_id, now + memory)
        return Turn.MERGED, other.task_id
    newer = lock.holder_published_after(published, now)
    if newer is not None:
        return Turn.MERGED, newer
    if other is not None and other.policy == "replace" and other.published < published:
        # The older successor, whether given up or not, has to learn of this when it comes. A rerun is not replaced.
        lock.overtaken[other.task_id] = Mark(mine, now + memory)
        _let_run_in_place_of_others(lock, mine, now + memory)
    if claim.asked:
        lock.ask_oldest_to_make_way(now)
    return _become(lock, claim, "replace", task_name, published, now)


def _let_run_in_place_of_others(lock: Lock, task_id: str, until: float) -> None:
    """Others have ended in its favour, or will, so it does not give up."""
    lock.merged_with.add(task_id)
    lock.stay_until(until)


def _become(lock: Lock, claim: Claim, policy: Succession, task_name: str, published: float, now: float) -> Outcome:
    lock.successor = Successor(claim.facts.task_id, now + PATIENCE, published, policy, task_name)
    lock.stay_until(now + PATIENCE)
    return Turn.MINE, None


def _published(claim: Claim, now: float) -> float:
    return claim.facts.published / 1_000_000 or now
