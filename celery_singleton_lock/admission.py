"""How a run gets in, or ends at the door: one order of questions for every policy."""

import logging
from dataclasses import replace

from celery_singleton_lock import signals
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.policies import POLICIES
from celery_singleton_lock.policies.base import Ended, Policy
from celery_singleton_lock.runs.arguments import unpack
from celery_singleton_lock.runs.redelivery import turn_back, wait_for_twin
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Done

logger = logging.getLogger("celery_singleton_lock")

_FIRST_DELAY = 0.25


def admit(run: Run) -> Ended | None:
    """Ask for the lock.

    The store answers at once, in this order: is this message done, does it have a run that lives, is there a free
    place? Only then the policy has its say.

    Returns:
        None if the body may run, else how the run has ended.

    Raises:
        LockHeld, StoreError, ConfigurationError, Ignore, Reject, Retry: The other ways to end.
    """
    policy = _policy_of(run)
    try:
        _say_what_is_unusual(run, policy)
        wait_for_twin(run)
        _look_for_its_run(run)
        ended = policy.arrive(run)
        if ended is not None:
            return ended
        answer = run.lease.acquire()
        if isinstance(answer, Conflict) and not answer.is_own and run.claim.crowds:
            run.is_in_crowd = True
        if isinstance(answer, Conflict) and _is_delivered_twice(run, answer):
            # Some brokers do not say so. Asked as a copy, the store tells its run.
            run.is_copy = run.claim.may_be_copy = True
            answer = run.lease.acquire()
        if isinstance(answer, Conflict) and not _is_own(run, answer):
            answer = policy.insist(run, answer)
        if answer is not None:
            return _end_at_the_door(run, policy, answer)
    except ConfigurationError:
        # It refuses us, and will the next time.
        raise
    except StoreError as error:
        return _unanswered(run, error)
    if run.lease.arguments:
        run.args, run.kwargs = unpack(run, run.lease.arguments)
    run.is_unlocked = run.options.mode == "until_executing"
    return None


def _look_for_its_run(run: Run) -> None:
    """Turn back a copy of a call that has joined, if a run of that call lives or has ended.

    It asks with a limit of 0, so it is given no place: first it has to look for the result that it waits for.
    """
    if run.is_copy and run.notes.joins:
        answer = run.store.acquire(replace(run.claim, limit=0))
        if isinstance(answer, Done) or (isinstance(answer, Conflict) and answer.is_own):
            turn_back(run, answer)


def _is_delivered_twice(run: Run, conflict: Conflict) -> bool:
    """The holder runs this very publication, though nothing on the message says that it was delivered before."""
    twins = [each for each in conflict.holders if each.task_id == run.task_id and each.fence]
    is_same = any(each.published == run.notes.published for each in twins)
    return run.can_come_again and is_same and not conflict.is_own


def _is_own(run: Run, conflict: Conflict) -> bool:
    """The holder bears the same task id, so what this run stored would be stored over its result."""
    is_another_message = any(holder.task_id == run.task_id and holder.fence for holder in conflict.holders)
    return run.can_come_again and (conflict.is_own or is_another_message)


def _policy_of(run: Run) -> Policy:
    """The policy of the task, or the nearest one that publishes nothing, if the message cannot come again."""
    policy = POLICIES[run.options.on_conflict]
    if run.is_broadcast and run.hands_over:
        # A retry waits for the run that it continues, which may be its sibling's.
        return POLICIES["wait"]
    if run.can_come_again or not policy.comes_again:
        return policy
    return POLICIES["raise" if run.request.is_eager else "wait"]


def _say_what_is_unusual(run: Run, policy: Policy) -> None:
    claim = run.claim
    # A later attempt is no new call, and a run that occupies its slot meanwhile must not wait for a message.
    claim.heeds_queued = run.options.unique_in_queue and not run.hands_over and policy is not POLICIES["wait"]
    # A retry has arguments of its own, unless the run before it has died with those that it had taken.
    takes_merged = policy.merges and (run.notes.died or not run.hands_over)
    claim.merges = run.task.name if takes_merged else ""
    claim.crowds = policy.comes_again and not run.notes.crowds
    claim.joins = policy is POLICIES["join"]


def _end_at_the_door(run: Run, policy: Policy, answer: Conflict | Done) -> Ended:
    if isinstance(answer, Done) or _is_own(run, answer):
        turn_back(run, answer)
    return Ended(policy.settle(run, answer))


def _unanswered(run: Run, error: StoreError) -> Ended | None:
    """End a run whose question got no answer, the way `lock_on_store_error` says; None to run without a lock."""
    outcome = _outcome_unanswered(run)
    logger.warning("lock.unanswered key=%s task_id=%s outcome=%s: %s", run.key, run.task_id, outcome, error)
    signals.lock_unanswered.send(sender=run.task, key=run.key, error=error, outcome=outcome)
    if outcome == "unlocked":
        run.is_unlocked = True
        return None
    if outcome == "skipped":
        return Ended(run.skip(str(error)))
    if outcome == "rescheduled":
        run.retry(error, run.delay(_FIRST_DELAY, run.options.ttl))
    raise error


def _outcome_unanswered(run: Run) -> str:
    policy = run.options.on_store_error
    if policy == "skip" and run.notes.asked:
        # Other calls may have been merged into this one.
        policy = "reschedule"
    if policy == "reschedule" and not run.can_come_again:
        policy = "raise"
    return {"run": "unlocked", "skip": "skipped", "raise": "raised", "reschedule": "rescheduled"}[policy]
