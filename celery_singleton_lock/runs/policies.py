"""A policy decides what becomes of a run that finds its key held."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from billiard.exceptions import WorkerLostError
from celery import Task, states
from celery.exceptions import Ignore, Retry

from celery_singleton_lock.definition.options import LockOptions, OnConflict, broker_delays, option_of
from celery_singleton_lock.leases.lease import has_locked, held_here
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.endings import (
    Ended,
    final_result,
    has_result,
    read_final_result,
    until_expired,
    why_unreadable,
)
from celery_singleton_lock.runs.message import Notes
from celery_singleton_lock.signals import ConflictOutcome
from celery_singleton_lock.stores.records import Claim, Conflict, Done, Holder, HolderState, Succession

if TYPE_CHECKING:
    from celery_singleton_lock.runs.run import Run

_FOR_EVER = float("inf")


class Refused(NamedTuple):
    outcome: ConflictOutcome
    holder: Holder
    words: str = ""  # for the result of a skipped run
    delay: float = 0.0  # in seconds
    notes: Mapping[str, Any] = {}  # to change on the requeued message


class Waits(NamedTuple):
    seconds: float


@dataclass(frozen=True)
class Policy:
    on_conflict: Callable[["Run", Conflict], Refused | Waits]
    waits_in: Literal["slot", "broker"] | None = None
    kind: Succession | None = None  # how its runs become the successor; None if they do not
    takes_turns: bool = False

    def for_call(self, notes: Notes) -> "Policy":
        """This policy, but `rerun` for the newest call if this policy could drop it.

        Older calls may have ended because the newest call does their work.
        """
        return POLICIES["rerun"] if notes.newest and self.kind is None else self

    def complete(self, claim: Claim, options: LockOptions, notes: Notes, *, is_later_attempt: bool) -> None:
        claim.newest = notes.newest
        # A run that waits in its slot must not wait for a queued call, which may need that slot.
        claim.heeds_queued = options.unique_in_queue and not is_later_attempt and self.waits_in != "slot"
        if self.kind is not None and not is_later_attempt:
            claim.succeeds = self.kind
            # An older message that comes within this time must end, or it would run after its successor.
            claim.supersedes_for = max(options.queue_ttl, options.redelivered_within)


def _skip(_: "Run", conflict: Conflict) -> Refused:
    # Cut off the remaining seconds, which would be wrong when the result is read.
    return Refused("skipped", conflict.first, words=str(conflict.first.refusal).partition(";")[0])


def _raise(_: "Run", conflict: Conflict) -> Refused:
    return Refused("raised", conflict.first)


def _reschedule(run: "Run", conflict: Conflict) -> Refused:
    return _raise(run, conflict) if _waiting_left(run, conflict) < REFUSED.first else _requeued(run, conflict)


def _wait(run: "Run", conflict: Conflict) -> Refused | Waits:
    """Wait in the slot once, and then requeue: the next delivery has its full time limit again."""
    # The run would wait for ever for a lock that its own caller holds.
    has_lock = held_here(run.key) is not None or has_locked(run.key)
    if not (run.claim.waits_here or has_lock):
        expires_in = until_expired(run.task, run.request.expires)
        return Waits(min(_waiting_left(run, conflict), expires_in))
    return _reschedule(run, conflict) if run.can_be_requeued else _raise(run, conflict)


def _run_next(run: "Run", conflict: Conflict) -> Refused:
    successor = conflict.successor
    if successor is None or successor == run.task_id:
        return _requeued(run, conflict, newest="next" if run.notes.newest or successor else "")
    coming = replace(conflict.first, state=HolderState.NEXT, task_id=successor, token="", fence=0)
    holder = next((one for one in conflict.holders if one.task_id == successor), coming)
    return Refused("superseded", holder, words=f"lock key={run.key}: superseded by task_id={successor}")


def _join(run: "Run", conflict: Conflict) -> Refused:
    holder = conflict.first
    notes = _joining(run, holder, conflict.at) if has_result(run.task, holder) else {"joins": ""}
    return _joined(run, holder, **notes)


POLICIES: dict[OnConflict, Policy] = {
    "skip": Policy(_skip),
    "raise": Policy(_raise),
    "reschedule": Policy(_reschedule, "broker", takes_turns=True),
    "wait": Policy(_wait, "slot"),
    "join": Policy(_join, "broker"),
    "rerun": Policy(_run_next, "broker", "rerun"),
    "replace": Policy(_run_next, "broker", "replace"),
}


def _requeued(run: "Run", conflict: Conflict, **notes: Any) -> Refused:
    is_next = conflict.successor == run.task_id
    waits_as_next = is_next and not broker_delays(run.task.app)
    if run.notes.rank or waits_as_next:
        # Never give up a successor.
        left = _waiting_left(run, conflict) if run.notes.rank else _FOR_EVER
        delay = delay_in_line(run.task, run.request.expires, left)
    else:
        delay = delay_of(run, SOON if is_next else REFUSED, conflict.first.expires_in)
    return Refused("rescheduled", conflict.first, delay=delay, notes={"waits_as_next": waits_as_next, **notes})


def _waiting_left(run: "Run", conflict: Conflict) -> float:
    waited = (conflict.at - run.claim.refused_at) / 1_000_000
    return _FOR_EVER if run.options.wait_timeout is None else run.options.wait_timeout - waited


class Backoff(NamedTuple):
    """Seconds until a requeued call asks again, doubled each time."""

    first: float
    longest: float
    # After a few refusals *longest* grows, to bound the load of many waiting calls.
    is_patient: bool = False


REFUSED = Backoff(0.25, 2.0, is_patient=True)
# For a successor, and for a copy while the other delivery runs, or has not stored its result.
SOON = Backoff(0.25, 2.0)
JOINED = Backoff(1.0, 1.0, is_patient=True)
# `retry()` and `replace()` publish milliseconds before their body ends.
CONTINUED = Backoff(0.05, 2.0)
_A_FEW = 8


def delay_of(run: "Run", backoff: Backoff, expires_in: float = _FOR_EVER) -> float:
    tries = run.notes.tries
    longest = backoff.longest
    if backoff.is_patient:
        longest *= 2.0 ** min(max(0, tries - _A_FEW), _A_FEW)
    delay = jittered(run.options, min(longest, run.options.ttl / 3, backoff.first * 2 ** min(tries, 10)))
    return min(delay, max(backoff.first / 5, expires_in))


def delay_in_line(task: Task, expires: Any, left: float) -> float:
    """Seconds until a message asks again if nobody wakes its turn."""
    # A worker discards an expired message only once its countdown ends.
    return min(jittered(task.lock_options, _FOR_EVER), left, until_expired(task, expires))


def jittered(options: LockOptions, delay: float) -> float:
    # The message stays unacknowledged, and near the visibility timeout it would be delivered twice.
    delay = min(delay, options.visibility_timeout / 4)
    return random.uniform(delay / 2, delay)


def fate_of_copy(run: "Run", answer: Conflict | Done) -> Refused:
    if isinstance(answer, Conflict):
        holder, expires_in = answer.first, answer.first.expires_in
    else:
        holder, expires_in = Holder.former(run.key, run.task_id, answer.attempt), _FOR_EVER
        # `ended`: the result is not stored yet. If the other run's process dies before that, this delivery has to run.
        if answer.outcome != "ended":
            return Refused("dropped", holder)
    is_next_attempt = (run.request.retries or 0) > holder.attempt or run.is_later_attempt
    return Refused("parked", holder, delay=delay_of(run, CONTINUED if is_next_attempt else SOON, expires_in))


# Seconds after the release. A joined run without a result by then counts as dead.
_RESULT_GRACE = 1.5


def fate_of_joiner(run: "Run") -> Ended | Refused | None:
    """What becomes of a joiner; None if the joined run is dead."""
    notes = run.notes
    joins = notes.joins
    if run.way == "copy":
        # A limit of 0 grants nothing: ask only whether another delivery of this message runs, or has run.
        answer = run.store.acquire(replace(run.claim, limit=0))
        if isinstance(answer, Done) or (isinstance(answer, Conflict) and answer.is_own):
            return fate_of_copy(run, answer)
    (state,) = run.store.survey([run.key])
    for holder in state.holders:
        if holder.task_id == joins:
            return _joined(run, holder, **({} if holder.fence == notes.joins_fence else _joining(run, holder)))
    # Look only once the joined run has no lease: before, its task id may have the result of an earlier run.
    try:
        kept = read_final_result(run.task, joins, notes.joins_since)
        # A joined run that goes on by `retry()` or `replace()` has stored its fence. A lower fence is an earlier run's.
        goes_on = kept is None and 0 < notes.joins_fence <= _fence_told(run.task, joins)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises)
        # The result may be there, so the joined run is not taken for dead yet.
        log.warning("lock.result_failed", "%s", error, key=run.key, task_id=run.task_id)
        kept, goes_on = None, True
    if kept is not None:
        result = kept.get("result")
        if kept["status"] == states.SUCCESS:
            return Ended(result)
        if kept["status"] == states.REVOKED:
            text = f"lock key={run.key}: task_id={joins}, which this run had joined, was revoked"
            return run.revoked(text, "joined", joins)
        return None if isinstance(result, WorkerLostError) else Ended(error=result)
    patience = run.options.queue_ttl if goes_on else _RESULT_GRACE
    free_since = notes.free_since or state.at
    is_patient = state.at - free_since < patience * 1_000_000
    return _joined(run, Holder.former(run.key, joins), free_since=free_since) if is_patient else None


def _joining(run: "Run", holder: Holder, at: int = 0) -> dict[str, Any]:
    joins = str(holder.task_id)
    # A result that is stored now is an earlier run's, and only a later result counts.
    since = holder.published if final_result(run.task, joins) else 0
    # A run that has not begun has no fence yet. Its fence will be at least *at*, the store's time now.
    fence = at if holder.goes_before else holder.fence
    return {"joins": joins, "joins_fence": fence, "joins_since": since, "free_since": 0}


def _joined(run: "Run", holder: Holder, **notes: Any) -> Refused:
    return Refused("joined", holder, delay=delay_of(run, JOINED), notes=notes)


@contextmanager
def telling_joiners(run: "Run") -> Iterator[None]:
    """Tell the run's joiners to wait for the attempt that is published inside."""
    try:
        yield
    except (Ignore, Retry):
        # `replace()` and `retry()` raise these once they have published.
        _tell_joiners(run)
        raise
    _tell_joiners(run)


def _tell_joiners(run: "Run") -> None:
    if _may_be_joined(run.task) and run.can_be_requeued and not (run.request.ignore_result or why_unreadable(run.task)):
        # Under an id of its own: `replace()` gives the call's id to its last task, whose result would overwrite this.
        try:
            # Not SUCCESS: Celery would then refuse to store the fence of a later run.
            run.task.backend.store_result(_id_for_fence(run.task_id), run.lease.fence, states.STARTED)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises)
            log.warning("lock.result_failed", "%s", error, key=run.key, task_id=run.task_id)


def _may_be_joined(task: Task) -> bool:
    # A task of another app may share a `lock_name`, and join.
    return option_of(task, "name") is not None or any(
        each.lock_options.on_conflict == "join" and task.name in (option_of(each, "name"), each.name)
        for each in task.app.tasks.values()
        if hasattr(each, "lock_options")
    )


def _fence_told(task: Task, task_id: str) -> int:
    # A cache may have the fence of an earlier run.
    kept = task.backend.get_task_meta(_id_for_fence(task_id), cache=False)
    return int(kept["result"] or 0) if kept["status"] == states.STARTED else 0


def _id_for_fence(task_id: str) -> str:
    return f"{task_id}-handed-on"
