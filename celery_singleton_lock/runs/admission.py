"""Ask for a run's lock, and carry out what its policy decides if the lock is held."""

from math import inf
from typing import Any, NoReturn

from celery.exceptions import Ignore, Retry

from celery_singleton_lock import signals
from celery_singleton_lock.definition.options import broker_delays
from celery_singleton_lock.definition.settings import limits_of_worker
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.counters import count, record
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.endings import Ended, Reason, unmark_if_ended, until_expired, workflows_of
from celery_singleton_lock.runs.message import has_copies, publish_again
from celery_singleton_lock.runs.policies import POLICIES, Policy, Refused, Waits, fate_of_copy, fate_of_joiner, jittered
from celery_singleton_lock.runs.run import RUNNING, UNLOCKED, Phase, Run
from celery_singleton_lock.stores.records import ACQUIRE_BOUND, Conflict, Done, Grant, Holder

# Seconds until a call that got no answer asks again for the first time.
_FIRST_DELAY = 0.25
# Seconds for a request. In less, a distant store would never answer.
_SHORTEST_PATIENCE = 0.5
# Seconds between two requests of one call to a store that stays away.
_LONGEST_DELAY = 60.0


def admit(run: Run) -> Phase | Ended:
    """Ask for the lock. Return the phase in which the body may run, or the end of a run without its body."""
    notes = run.notes
    is_usual = run.way == "first" and not (notes.newest or notes.marked or notes.joins)
    policy = POLICIES[run.options.on_conflict] if is_usual else _nearest(run)
    try:
        # A silent store must not use up the time limit.
        if (longest := _longest_wait(run)) < run.claim.patience:
            run.claim.patience = max(_SHORTEST_PATIENCE, longest)
        # Most runs skip this and ask at once: `_prepare` would change nothing in their claims.
        if not is_usual or run.options.mode != "while_executing" or policy.takes_turns or policy.kind:
            settled = _prepare(run, policy)
            if settled is not None:
                return settled
        answer = run.lease.acquire()
        return RUNNING if isinstance(answer, Grant) else _admit_otherwise(run, policy, answer)
    except ConfigurationError:
        # `StoreRefused` is a `StoreError`, too, but `lock_on_store_error` does not apply: the store would refuse each
        # retry.
        raise
    except StoreError as error:
        return _unanswered(run, error)


def _prepare(run: Run, policy: Policy) -> Phase | Ended | None:
    """Complete the claim. None if the run still has to ask for its lock."""
    notes = run.notes
    options = run.options
    claim = run.claim
    # Complete the claim only after `fate_of_joiner`, which sends it to the store: there, a complete claim could take a
    # turn, or make this run the successor.
    if notes.joins and (fate := fate_of_joiner(run)) is not None:
        return _carry_out(run, fate)
    policy.complete(claim, options, notes, is_later_attempt=run.is_later_attempt)
    if options.mode == "until_executing":
        return _begin_without_lease(run, policy)
    if notes.marked:
        claim.queued_for = min(options.queue_ttl, until_expired(run.task, run.request.expires))
    if policy.takes_turns and run.can_be_requeued and not broker_delays(run.task.app):
        claim.turn_for = options.redelivered_within
        claim.rank = notes.rank or notes.refused_at
    return None


def _admit_otherwise(run: Run, policy: Policy, answer: Grant | Conflict | Done) -> Phase | Ended:
    if isinstance(answer, Conflict) and _is_delivered_twice(run, answer):
        run.way = "copy"
        run.claim.may_be_copy = True
        answer = run.lease.acquire()
    if isinstance(answer, Conflict) and run.options.mode == "until_executed" and _passes_over(run, answer.first):
        answer = run.lease.acquire()
    return _settle(run, policy, answer)


def _settle(run: Run, policy: Policy, answer: Grant | Conflict | Done) -> Phase | Ended:
    if isinstance(answer, Grant):
        return RUNNING
    if isinstance(answer, Done) or _is_of_its_call(run, answer):
        return _carry_out(run, fate_of_copy(run, answer))
    if policy.waits_in is None and run.can_be_requeued:
        # Wait where a skip or an error could lose this call's work. With `is_early`, the call in the way has no lease
        # yet, and may never come. With `call_ended`, the holder's call is over, so the holder does not do this work.
        is_early = run.is_later_attempt and answer.first.goes_before
        if is_early or any(each.call_ended for each in answer.holders):
            policy = POLICIES["reschedule"]
    run.notes.rank = answer.rank if policy.takes_turns else 0
    fate = policy.on_conflict(run, answer)
    if isinstance(fate, Waits):
        return _settle(run, policy, _wait(run, answer.first, min(fate.seconds, _longest_wait(run))))
    return _carry_out(run, fate)


def _wait(run: Run, holder: Holder, seconds: float) -> Grant | Conflict | Done:
    log.info("lock.waiting", key=run.key, task_id=run.task_id, holder=holder.task_id)
    run.send_event("lock-waiting", key=run.key, holder=holder.task_id)
    answer = run.lease.wait(seconds)
    if isinstance(answer, Grant):
        run.send_event("lock-acquired", key=run.key, waited=run.lease.waited)
    else:
        run.lease.release()
    return answer


def _passes_over(run: Run, queued: Holder) -> bool:
    if not queued.is_queued_or_next:
        return False
    is_step = [run.key, queued.task_id] in workflows_of(vars(run.request))
    # A callback of the workflow's last step has no header that names the workflow. It may come while the workflow still
    # counts as queued, and is known by its root, which is the queued call.
    if is_step or queued.task_id == run.request.root_id:
        run.claim.heeds_queued = False
        return True
    return unmark_if_ended(run.task, run.key, queued)


def _begin_without_lease(run: Run, policy: Policy) -> Phase | Ended:
    # A copy must not end for another queued call: the first delivery may have ended this call's mark, so that the other
    # call could be queued. With `rerun` and `replace` (`kind`), `heeds` has no effect.
    is_copy = policy.kind is None and has_copies(run.request, run.notes, run.delivery, run.options)
    heeds = not (run.is_later_attempt or is_copy or policy.waits_in == "slot")
    if heeds or run.notes.marked:
        conflict = run.store.unmark(run.key, run.task_id, ends_cooldown=False, heeds=heeds, claim=run.claim)
        if conflict is not None:
            run.claim.refused_at = run.claim.refused_at or conflict.at
            return _settle(run, policy, conflict)
        run.notes = run.notes.of_the_call()
    return UNLOCKED


def _is_delivered_twice(run: Run, conflict: Conflict) -> bool:
    """The holder runs this same message: some brokers do not mark a redelivery."""
    twins = [each for each in conflict.holders if each.task_id == run.task_id and not each.goes_before]
    is_same = any(each.published == run.notes.first_published for each in twins)
    return run.can_be_requeued and is_same and not conflict.is_own


def _is_of_its_call(run: Run, conflict: Conflict) -> bool:
    """The holder runs the same call: it has this task id, or has published this run by `replace()`.

    If this run were skipped, its result would be stored over the holder's.
    """
    begun = [holder for holder in conflict.holders if not holder.goes_before]
    has_its_id = any(holder.task_id == run.task_id for holder in begun)
    origin = run.notes.origin
    replaces_it = origin is not None and any(holder.fence == origin.fence for holder in begun)
    return run.can_be_requeued and (conflict.is_own or has_its_id or replaces_it)


def _nearest(run: Run) -> Policy:
    policy = POLICIES[run.options.on_conflict].for_call(run.notes)
    if run.can_be_requeued:
        return policy
    if run.way == "broadcast" and run.is_later_attempt:
        # The run before this retry may still have the lock, so a skip would lose the retry.
        return POLICIES["wait"]
    if policy.waits_in == "broker":
        return POLICIES["raise" if run.request.is_eager else "wait"]
    return policy


# The part of the time limit for which a run may wait in its slot.
_SHARE = 1 / 4


def _longest_wait(run: Run) -> float:
    timed, request = (run.map, run.map.request) if run.way == "item" else (run.task, run.request)
    hard, soft = request.timelimit or (None, None)
    hard = hard or timed.time_limit or limits_of_worker[0]
    soft = soft or timed.soft_time_limit or limits_of_worker[1]
    if not (hard or soft) or request.is_eager:
        return inf
    return min(limit for limit in (hard, soft) if limit) * _SHARE - run.age


def _carry_out(run: Run, fate: Ended | Refused) -> Ended:
    if isinstance(fate, Ended):
        return fate
    outcome, holder = fate.outcome, fate.holder
    if outcome == "parked":
        publish_again(run, fate.delay)
    _report(run, holder, outcome)
    match outcome:
        case "skipped" | "superseded":
            return _skip(run, fate.words, outcome, holder.task_id)
        case "raised":
            raise holder.refusal
        case "rescheduled" | "joined":
            _requeue(run, holder.refusal, fate.delay, **fate.notes)
    if outcome == "dropped" and run.way != "copy":
        # The dropped call may be a retry that was cancelled because its run was asked to stop. End its marks, which
        # would keep out later calls.
        run.unmark()
    run.was_passed_on = True
    # Not `Retry`, which would hide the state of the other delivery.
    raise Ignore(f"{outcome}: the result is that of another run of this very task")


def _skip(run: Run, words: str, reason: Reason, task_id: str | None) -> Ended:
    return Ended(run.options.skip_result) if run.options.skips_with_result else run.revoked(words, reason, task_id)


def _requeue(run: Run, why: Exception, delay: float, *, may_be_over: bool = False, **notes: Any) -> NoReturn:
    """Requeue the call as `retry()` does, but without counting a retry."""
    run.store_retry(why, run.key, may_be_over=may_be_over)
    sig = publish_again(run, delay, refused_at=run.claim.refused_at, rank=run.notes.rank, **notes)
    raise Retry(str(why), exc=why, when=delay, sig=sig)


def _report(run: Run, holder: Holder, outcome: signals.ConflictOutcome) -> None:
    is_first = outcome not in ("rescheduled", "joined") or not (run.notes.refused_at or run.notes.joins)
    log.tell_of_conflict(run.key, run.task_id, holder, outcome, is_first=is_first)
    if is_first:
        count(run.store, run.key, "conflicts", run.task.name, outcome)
        record(run.store, run.key, "conflict", outcome, run.task.name, run.claim, holder.task_id)
    signals.lock_conflict.send(sender=run.task, key=run.key, holder=holder, outcome=outcome)
    # A monitor would take an event named `task-...` for a state of the task.
    run.send_event("lock-conflict", key=run.key, holder=holder.task_id, outcome=outcome)


def _unanswered(run: Run, error: StoreError) -> Phase | Ended:
    timeout = run.options.wait_timeout
    tried = run.notes.unanswered / 1_000_000 + min(run.age, ACQUIRE_BOUND)
    # Never give up a newest call: older calls may have ended because it does their work.
    left = inf if timeout is None or run.notes.newest else timeout - tried
    outcome = _outcome_unanswered(run)
    if outcome == "rescheduled" and left < _FIRST_DELAY:
        why = f"tried for {tried:.1f} s, and lock_wait_timeout is {timeout:g} s"
        outcome = "raised"
        error = StoreError(error.store, f"{error.problem}; {why}")
    was_told_before = outcome == "rescheduled" and run.notes.unanswered
    write = log.info if was_told_before else log.warning
    write("lock.unanswered", "%s", error, key=run.key, task_id=run.task_id, outcome=outcome)
    count(run.store, run.key, "unanswered", run.task.name, run.options.on_store_error)
    if not was_told_before:
        record(run.store, run.key, "unanswered", outcome, run.task.name, run.claim)
    signals.lock_unanswered.send(sender=run.task, key=run.key, error=error, outcome=outcome)
    if outcome == "unlocked":
        return UNLOCKED
    if outcome == "skipped":
        return _skip(run, str(error), "unanswered", None)
    if outcome == "rescheduled":
        # Exponential backoff: a delay is about as long as the time since the first try.
        delay = jittered(run.options, min(_LONGEST_DELAY, left, max(_FIRST_DELAY, tried)))
        unanswered = round((tried + delay) * 1_000_000)
        notes = {"unanswered": unanswered, "waits_as_next": run.notes.waits_as_next}
        _requeue(run, error, delay, may_be_over=run.way == "copy", **notes)
    raise error


def _outcome_unanswered(run: Run) -> signals.UnansweredOutcome:
    match run.options.on_store_error:
        case "run":
            return "unlocked"
        case "skip" if not run.notes.newest:
            return "skipped"
        case "skip" | "reschedule" if run.can_be_requeued:
            return "rescheduled"
    return "raised"
