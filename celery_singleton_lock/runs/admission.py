"""Admission of a run: one order of questions for every policy."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from celery import Task
from celery.app.task import Context

from celery_singleton_lock import signals
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.counters import count, note
from celery_singleton_lock.log import log
from celery_singleton_lock.options import LockOptions, OnStoreError
from celery_singleton_lock.runs.delivery import BROADCAST, COPY, FIRST, has_copies, is_later_attempt, redelivered_within
from celery_singleton_lock.runs.marks import has_ended, unmark, workflows_of
from celery_singleton_lock.runs.notes import Notes
from celery_singleton_lock.runs.policies import POLICIES, Asks, Ended, Policy, longest_wait
from celery_singleton_lock.runs.redelivery import finish_copy
from celery_singleton_lock.runs.requeue import broker_delays, jittered, requeue
from celery_singleton_lock.runs.run import Phase, Run
from celery_singleton_lock.stores.records import Claim, Conflict, Done, Grant, Holder
from celery_singleton_lock.stores.redis.store import ACQUIRE_BOUND

_FIRST_DELAY = 0.25
# Seconds that each try has at least, because otherwise a far-away store would never be reached.
_SHORTEST_PATIENCE = 0.5
# Each call asks a store that stays away once in so many seconds.
_LONGEST_DELAY = 60.0
_OUTCOMES: dict[OnStoreError, signals.UnansweredOutcome] = {
    "run": "unlocked",
    "skip": "skipped",
    "raise": "raised",
    "reschedule": "rescheduled",
}


class Admitted(NamedTuple):
    """The body may run, in this phase."""

    phase: Phase


UNDER_LEASE = Admitted(Phase.RUNNING)
UNLOCKED = Admitted(Phase.UNLOCKED)


def admit(run: Run) -> Admitted | Ended:
    """Ask for the lock.

    The store answers at once, in this order: is this message done, does it have a run that lives, does a newer call run
    in its place, do others go before it, is there a free place? What becomes of a refused run its policy decides.

    Raises:
        LockHeld, StoreError, ConfigurationError, Ignore, Reject, Retry: Other ways in which the run has ended.
    """
    policy = POLICIES[run.options.on_conflict]
    if run.way is not FIRST or run.notes.newest:
        policy = _nearest(run, policy)
    try:
        # A silent store must not use up the time limit, either.
        if (longest := longest_wait(run)) < run.lease.claim.patience:
            run.lease.claim.patience = max(_SHORTEST_PATIENCE, longest)
        mode = run.options.mode
        if mode == "until_executing":
            return _begin_without_lease(run, policy)
        is_usual = mode == "while_executing" and not (policy.takes_turns or policy.kind)
        if not is_usual or run.way is COPY or run.notes.joins:
            ended = _prepare(run, policy)
            if isinstance(ended, Ended):
                return ended
        answer = run.lease.acquire()
        return UNDER_LEASE if isinstance(answer, Grant) else _admit_otherwise(run, policy, answer)
    except ConfigurationError:
        # It refuses us, and will the next time.
        raise
    except StoreError as error:
        return _unanswered(run, error)


def _prepare(run: Run, policy: Policy) -> Ended | Asks:
    """Do what comes before the question."""
    _complete(run.claim, policy, run.options, is_later_attempt=run.is_later_attempt)
    if policy.takes_turns and run.can_be_requeued and not broker_delays(run.task.app):
        # For as long as its message can be somewhere.
        run.claim.turn_for = redelivered_within(run.options)
        run.claim.rank = max(0, run.notes.rank) or run.notes.refused_at
    if run.way is COPY and run.notes.joins:
        _look_for_its_run(run)
    return policy.before_acquire(run)


def _admit_otherwise(run: Run, policy: Policy, answer: Grant | Conflict | Done) -> Admitted | Ended:
    """Go on after a first answer that was no grant."""
    if isinstance(answer, Conflict) and _is_delivered_twice(run, answer):
        # Some brokers do not mark a redelivery. If the call asks as a copy, the store names its run.
        run.way = COPY
        run.claim.may_be_copy = True
        answer = run.lease.acquire()
    if isinstance(answer, Conflict) and run.options.mode == "until_executed" and _passes_over(run, answer.first):
        answer = run.lease.acquire()
    if isinstance(answer, Conflict) and not _is_of_its_call(run, answer):
        answer = policy.on_conflict(run, answer)
    return UNDER_LEASE if isinstance(answer, Grant) else _finish_refused(run, policy, answer)


def _passes_over(run: Run, queued: Holder) -> bool:
    """The run may go before that call: it is a step of the workflow that replaces the call, or that has ended."""
    if not queued.is_queued_or_next:
        return False
    is_step = [run.key, queued.task_id] in workflows_of(vars(run.request))
    # Celery publishes what is linked to the last step before the step's end is stored.
    if is_step or queued.task_id == run.request.root_id:
        run.claim.heeds_queued = False
        return True
    if not has_ended(run.task, queued):
        return False
    unmark(run.store, run.key, str(queued.task_id), ends_cooldown=False, call_ended=True)
    return True


def _begin_without_lease(run: Run, policy: Policy) -> Admitted | Ended:
    """Begin a run of `until_executing`: its call is queued no longer. Only another queued call is in its way."""
    # A message that was delivered before may have begun, and must not end its call in favour of a later one, unless the
    # newest one counts.
    is_copy = policy.kind is None and has_copies(run.request, run.notes, run.delivery, run.options)
    heeds = not (run.is_later_attempt or is_copy or policy.occupies_a_slot)
    _complete(run.claim, policy, run.options, is_later_attempt=run.is_later_attempt)
    if heeds or run.notes.marked:
        conflict = run.store.unmark(run.key, run.task_id, ends_cooldown=False, heeds=heeds, claim=run.claim)
        if conflict is not None:
            run.claim.refused_at = run.claim.refused_at or conflict.at
            return _finish_refused(run, policy, conflict)
        run.notes = run.notes.of_the_call()
    return UNLOCKED


def _look_for_its_run(run: Run) -> None:
    """Turn back a copy of a call that has joined, if its run lives or has ended.

    It asks with a limit of 0, so it gets no place: it first has to look for the result that it waits for.
    """
    answer = run.store.acquire(replace(run.claim, limit=0))
    if isinstance(answer, Done) or (isinstance(answer, Conflict) and answer.is_own):
        finish_copy(run, answer)


def _is_delivered_twice(run: Run, conflict: Conflict) -> bool:
    """The holder runs this very publication, though nothing on the message says that it was delivered before."""
    twins = [each for each in conflict.holders if each.task_id == run.task_id and not each.goes_before]
    is_same = any(each.published == run.notes.first_published for each in twins)
    return run.can_be_requeued and is_same and not conflict.is_own


def _is_of_its_call(run: Run, conflict: Conflict) -> bool:
    """The run replaces the holder, or has its task id, so a result of this run would overwrite the holder's."""
    begun = [holder for holder in conflict.holders if not holder.goes_before]
    has_its_id = any(holder.task_id == run.task_id for holder in begun)
    origin = run.notes.origin
    # A fence is given once.
    replaces_it = origin is not None and any(holder.fence == origin.fence for holder in begun)
    return run.can_be_requeued and (conflict.is_own or has_its_id or replaces_it)


def _of_newest(policy: Policy, notes: Notes) -> Policy:
    """The policy of the task; or `rerun` for a newest call, which had that policy as others ended in its favour."""
    return POLICIES["rerun"] if notes.newest and policy.kind is None else policy


def _nearest(run: Run, policy: Policy) -> Policy:
    """The policy of the task, or the nearest one that publishes nothing, if the message cannot be requeued."""
    policy = _of_newest(policy, run.notes)
    if run.can_be_requeued:
        return policy
    if run.way is BROADCAST and run.is_later_attempt:
        # A retry waits for the run that it continues, which may be its sibling's.
        return POLICIES["wait"]
    return policy.without_broker(run)


def _complete(claim: Claim, policy: Policy, options: LockOptions, *, is_later_attempt: bool) -> None:
    # A later attempt is no new call. And a run that occupies its slot while it waits must not wait for a message.
    claim.heeds_queued = options.unique_in_queue and not is_later_attempt and not policy.occupies_a_slot
    if policy.kind is not None and not is_later_attempt:
        claim.succeeds = policy.kind
        # A message that waits in a queue for long is still older than the call that has superseded it.
        claim.supersedes_for = max(options.queue_ttl, redelivered_within(options))


def claim_in_line(task: Task, claim: Claim, notes: Notes, message: Mapping[str, Any]) -> Claim:
    """The claim of the run that a message will have.

    A main process knows a part of it; the rest is in our notes on the message, and in what Celery has written there.
    """
    options = task.lock_options
    policy = _of_newest(POLICIES[options.on_conflict], notes)
    claim.rank = notes.rank
    claim.newest = notes.newest
    claim.facts.task_name = options.holder_name
    claim.facts.published = notes.first_published
    _complete(claim, policy, options, is_later_attempt=is_later_attempt(Context(message), notes))
    return claim


def _finish_refused(run: Run, policy: Policy, answer: Conflict | Done) -> Ended:
    if isinstance(answer, Done) or _is_of_its_call(run, answer):
        finish_copy(run, answer)
    # Nobody runs yet, and the successor may never come. Or only the end of a body is awaited, whose call has ended.
    is_early = run.is_later_attempt and answer.first.goes_before
    would_be_lost = is_early or any(each.call_ended for each in answer.holders)
    if would_be_lost and run.can_be_requeued:
        policy = policy.for_later_attempt()
    return Ended(policy.finish(run, answer))


def _unanswered(run: Run, error: StoreError) -> Admitted | Ended:
    """End a run whose question got no answer, or admit it without a lock, as `lock_on_store_error` says."""
    tried = run.notes.unanswered / 1_000_000 + min(run.age, ACQUIRE_BOUND)
    outcome = _outcome_unanswered(run)
    if outcome == "rescheduled" and _asking_left(run, tried) < _FIRST_DELAY:
        why = f"tried for {tried:.1f} s, and lock_wait_timeout is {run.options.wait_timeout:g} s"
        outcome = "raised"
        error = StoreError(error.store, f"{error.problem}; {why}")
    was_told_before = outcome == "rescheduled" and run.notes.unanswered
    level = logging.INFO if was_told_before else logging.WARNING
    log.write(level, "lock.unanswered", "%s", error, key=run.key, task_id=run.task_id, outcome=outcome)
    count(run.store, run.key, "unanswered", run.task.name, run.options.on_store_error)
    if not was_told_before:
        note(run.store, run.key, "unanswered", outcome, run.task.name, run.claim.facts)
    signals.lock_unanswered.send(sender=run.task, key=run.key, error=error, outcome=outcome)
    if outcome == "unlocked":
        return UNLOCKED
    if outcome == "skipped":
        return Ended(run.skip(str(error), "unanswered"))
    if outcome == "rescheduled":
        # The delay doubles the time so far, because nothing tells when the store is back.
        delay = jittered(run, min(_LONGEST_DELAY, _asking_left(run, tried), max(_FIRST_DELAY, tried)))
        unanswered = round((tried + delay) * 1_000_000)
        # Only the store knows whether the run of which this is a copy has ended.
        requeue(run, error, delay, may_be_over=run.way is COPY, unanswered=unanswered, rank=run.notes.rank)
    raise error


def _asking_left(run: Run, tried: float) -> float:
    """Seconds for which it may still try; a newest call has no bound, because others may have ended in its favour."""
    timeout = run.options.wait_timeout
    return float("inf") if timeout is None or run.notes.newest else timeout - tried


def _outcome_unanswered(run: Run) -> signals.UnansweredOutcome:
    policy = run.options.on_store_error
    if policy == "skip" and run.notes.newest:
        # Other calls may have ended in favour of this one.
        policy = "reschedule"
    if policy == "reschedule" and not run.can_be_requeued:
        policy = "raise"
    return _OUTCOMES[policy]
