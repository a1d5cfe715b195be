"""A class for each policy decides what becomes of a run that finds its key held. `runs/admission.py` carries it out."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from billiard.exceptions import WorkerLostError
from celery import Task, states
from celery.exceptions import Ignore, Retry

from celery_singleton_lock.definition.options import OnConflict, option_of
from celery_singleton_lock.leases.lease import has_locked, held_here
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.endings import final_result, has_result, why_unreadable
from celery_singleton_lock.runs.message import state_for, state_of
from celery_singleton_lock.runs.requeue import JOINED, NEXT, REFUSED, broker_delays, delay_in_line, delay_of
from celery_singleton_lock.runs.run import Ended, Run
from celery_singleton_lock.signals import ConflictOutcome
from celery_singleton_lock.stores.records import Conflict, Holder, HolderState, LockState, Succession

# The part of a time limit that a run may wait in its slot; the rest is for the body.
_SHARE = 1 / 4

_NO_LIMITS: tuple[float | None, float | None] = None, None
_FOR_EVER = float("inf")
_limits_of_the_worker = _NO_LIMITS


class Refused(NamedTuple):
    """What becomes of a run that does not get its lock: the outcome, as the log names it, and the holder in its way."""

    outcome: ConflictOutcome
    holder: Holder
    words: str = ""  # why the run is skipped, for its result
    delay: float = 0.0  # seconds until the requeued message comes again
    notes: Mapping[str, Any] = {}  # to change on the requeued message


class WaitsHere(NamedTuple):
    """The run waits in its slot for so many seconds at most, and then its policy is asked again."""

    seconds: float


class Policy(ABC):
    """Decides what becomes of a run that finds its key held, and does nothing itself."""

    # Its runs wait in slots of the pool, so they must not wait for a message, which may need that very slot.
    occupies_a_slot = False
    # The rule by which its runs become the successor; None if they do not.
    kind: Succession | None = None
    # Its messages keep their turns in the line while they are in the broker.
    takes_turns = False

    def without_broker(self, run: Run) -> "Policy":  # noqa: ARG002
        """The nearest policy for a run whose message cannot go back to the broker."""
        return self

    def for_later_attempt(self) -> "Policy":
        """The nearest policy that loses no work if the call in the way has ended, or may never come."""
        return self

    def before_acquire(self, run: Run) -> Ended | Refused | None:  # noqa: ARG002
        """The decision about a run that need not ask for its lock; None if the run asks."""
        return None

    @abstractmethod
    def on_conflict(self, run: Run, conflict: Conflict) -> Refused | WaitsHere:
        """The decision about a run that was refused."""


class Skip(Policy):
    """`skip`: the run does nothing, and names the holder that does the work."""

    def for_later_attempt(self) -> Policy:
        return POLICIES["reschedule"]

    def on_conflict(self, run: Run, conflict: Conflict) -> Refused:  # noqa: ARG002
        # A result is read much later, so leave out how long the lease lasts.
        return Refused("skipped", conflict.first, words=str(conflict.first.refusal).partition(";")[0])


class Raise(Policy):
    """`raise`: the run fails."""

    def for_later_attempt(self) -> Policy:
        return POLICIES["reschedule"]

    def on_conflict(self, run: Run, conflict: Conflict) -> Refused:  # noqa: ARG002
        return Refused("raised", conflict.first)


class Requeues(Policy):
    """Its runs wait in the broker, and have no other way to wait."""

    def without_broker(self, run: Run) -> Policy:
        return POLICIES["raise" if run.request.is_eager else "wait"]


class Reschedule(Requeues):
    """`reschedule`: back to the broker, where it waits for its turn."""

    takes_turns = True

    def on_conflict(self, run: Run, conflict: Conflict) -> Refused:
        """Requeue it, unless it has waited long enough."""
        if _waiting_left(run, conflict) < REFUSED.first:
            return Refused("raised", conflict.first)
        return _requeued(run, conflict)


class Wait(Policy):
    """`wait`: first come, first served, in a slot of the pool."""

    occupies_a_slot = True

    def on_conflict(self, run: Run, conflict: Conflict) -> Refused | WaitsHere:
        """Let a run wait once. Then give up, or requeue it to wait again: each delivery has its full time limit.

        A run does not wait for a lock that the calling code has.
        """
        left = _waiting_left(run, conflict)
        has_lock = held_here(run.key) is not None or has_locked(run.key)
        if not (run.claim.waits_here or has_lock):
            return WaitsHere(min(left, longest_wait(run)))
        if not run.can_be_requeued or left < REFUSED.first:
            return Refused("raised", conflict.first)
        return _requeued(run, conflict)


class NextRun(Requeues):
    """`rerun` and `replace`: the call that was published last runs next, and older calls end in its favour."""

    def __init__(self, kind: Succession) -> None:
        self.kind = kind

    def on_conflict(self, run: Run, conflict: Conflict) -> Refused:
        """Requeue it, or end it like a skipped run that names the call that superseded it."""
        successor = conflict.successor
        if successor is None or successor == run.task_id:
            # A retry never asked to be next, so it supersedes no call.
            return _requeued(run, conflict, newest="next" if run.notes.newest or successor else "")
        coming = replace(conflict.first, state=HolderState.NEXT, task_id=successor, token="", fence=0)
        holder = next((one for one in conflict.holders if one.task_id == successor), coming)
        return Refused("superseded", holder, words=f"lock key={run.key}: superseded by task_id={successor}")


class Join(Requeues):
    """`join`: the holder's result or error is the run's as well."""

    def before_acquire(self, run: Run) -> Ended | Refused | None:
        """The result of the joined run, if that run has ended."""
        joins = run.notes.joins
        if not joins:
            return None
        (state,) = run.store.survey([run.key])
        for holder in state.holders:
            if holder.task_id == joins:
                return _joined(run, holder, **(_joining(run, holder) if holder.fence != run.notes.joins_fence else {}))
        # Look only now: while the joined run holds the lock, a result may be an earlier run's with the same task id.
        return _result_of(run, joins, state)

    def on_conflict(self, run: Run, conflict: Conflict) -> Refused:
        holder = conflict.first
        notes = _joining(run, holder, conflict.at) if has_result(run.task, holder) else _JOINS_NOBODY
        return _joined(run, holder, **notes)


POLICIES: dict[OnConflict, Policy] = {
    "skip": Skip(),
    "raise": Raise(),
    "reschedule": Reschedule(),
    "wait": Wait(),
    "join": Join(),
    "rerun": NextRun("rerun"),
    "replace": NextRun("replace"),
}


def _requeued(run: Run, conflict: Conflict, **notes: Any) -> Refused:
    is_next = conflict.successor == run.task_id
    waits_as_next = is_next and not broker_delays(run.task.app)
    if run.notes.rank or waits_as_next:
        left = _waiting_left(run, conflict)
        # After the timeout only `rerun` and `replace` get here, whose delay the timeout does not bound.
        left = left if left >= REFUSED.first else _FOR_EVER
        delay = delay_in_line(run.task, run.request.expires, left)
    else:
        delay = delay_of(run, NEXT if is_next else REFUSED, conflict.first.expires_in)
    return Refused("rescheduled", conflict.first, delay=delay, notes={"waits_as_next": waits_as_next, **notes})


def _waiting_left(run: Run, conflict: Conflict) -> float:
    """Seconds that are left of `lock_wait_timeout`, by the store's clock, since the first refusal."""
    waited = (conflict.at - run.claim.refused_at) / 1_000_000
    return float("inf") if run.options.wait_timeout is None else run.options.wait_timeout - waited


# Waiting in a slot of the pool, while a time limit goes on.


def remember_limits(worker: Any) -> None:
    """Keep the worker's time limits for its pool processes, which inherit them: Celery does not pass them on."""
    global _limits_of_the_worker  # noqa: PLW0603 (a process has one)
    _limits_of_the_worker = worker.time_limit, worker.soft_time_limit


def longest_wait(run: Run) -> float:
    """Seconds for which the run may still wait in its slot; infinite if no time limit ends it there."""
    # For an item, the time limit of its map goes on.
    timed = run.task
    request = run.request
    if run.way == "item":
        timed = run.map
        request = timed.request
    # A worker chooses its limits in this order.
    hard, soft = request.timelimit or _NO_LIMITS
    hard = hard or timed.time_limit or _limits_of_the_worker[0]
    soft = soft or timed.soft_time_limit or _limits_of_the_worker[1]
    if not (hard or soft) or request.is_eager:
        return _FOR_EVER
    state = state_of(request)
    waited = state.waited if state is not None else 0.0
    return min(limit for limit in (hard, soft) if limit) * _SHARE - waited - run.age


def count_wait(run: Run) -> None:
    """Count the time that an item of a map has waited, because all items share the time limit of their map."""
    if run.way == "item":
        state_for(run.map.request).waited += run.age


# Ending with the result of another run.

# Seconds from the release of a lease until its result is stored. A result that is still missing then never comes: the
# holder has died, or keeps no results.
_RESULT_GRACE = 1.5
_JOINS_NOBODY = {"joins": "", "joins_fence": 0, "joins_since": 0, "free_since": 0}


def _joining(run: Run, holder: Holder, at: int = 0) -> dict[str, Any]:
    joins = str(holder.task_id)
    # If no result is stored under this id yet, the next result is the holder's. Otherwise their times tell them apart.
    since = holder.published if final_result(run.task, joins) else 0
    # A run that has not begun has no fence yet; its fence will be greater than the time of the store now.
    fence = at if holder.goes_before else holder.fence
    return {"joins": joins, "joins_fence": fence, "joins_since": since, "free_since": 0}


def _joined(run: Run, holder: Holder, **notes: Any) -> Refused:
    return Refused("joined", holder, delay=delay_of(run, JOINED), notes=notes)


def _result_of(run: Run, joins: str, state: LockState) -> Ended | Refused | None:
    kept = final_result(run.task, joins, run.notes.joins_since) or {}
    outcome = kept.get("status")
    result = kept.get("result")
    if outcome == states.SUCCESS:
        return Ended(result)
    if outcome == states.REVOKED:
        return run.revoked(
            f"lock key={run.key}: task_id={joins}, which this run had joined, was revoked", "joined", joins
        )
    if outcome == states.FAILURE:
        return None if isinstance(result, WorkerLostError) else Ended(error=result)
    # A run that goes on by `retry()` or `replace()` may end much later, so `_tell_joiners` has stored its fence. An
    # older fence belongs to an earlier run with this task id. The wait is bounded, because a message may be lost.
    goes_on = 0 < run.notes.joins_fence <= _fence_told(run.task, joins)
    patience = run.options.queue_ttl if goes_on else _RESULT_GRACE
    # Measured by the clock of the store, because the call may come to another host, with another clock, each time.
    free_since = run.notes.free_since or state.at
    if state.at - free_since < patience * 1_000_000:
        return _joined(run, Holder.former(run.key, joins), free_since=free_since)
    # The joined run counts as dead: it has had no lock for too long.
    return None


# Telling the calls that have joined a run.


@contextmanager
def telling_joiners(run: Run) -> Iterator[None]:
    """Tell the calls that have joined the run to wait for the attempt published inside, which may hold no lock yet."""
    try:
        yield
    except (Ignore, Retry):
        # The message was published: `replace()` and `retry()` end by raising these.
        _tell_joiners(run)
        raise
    _tell_joiners(run)


def _tell_joiners(run: Run) -> None:
    """Tell the calls that have joined the run to wait for its retry, or for the tasks of `replace()`."""
    if _may_be_joined(run.task) and run.can_be_requeued and not (run.request.ignore_result or why_unreadable(run.task)):
        # Under an id of its own, because the last task of `replace()` stores its states under the id of this call.
        try:
            # The state is STARTED, which a later run of the call may overwrite with its own fence.
            run.task.backend.store_result(_word_of(run.task_id), run.lease.fence, states.STARTED)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises)
            # Without this word the joiners ask for the lock too early.
            log.write(logging.WARNING, "lock.result_failed", "%s", error, key=run.key, task_id=run.task_id)


def _may_be_joined(task: Task) -> bool:
    """Whether a call may have joined: the lock has a name of its own, or a task of this app has it and `join`."""
    if option_of(task, "name") is not None:
        return True
    tasks = [each for each in task.app.tasks.values() if getattr(each, "lock_options", None) is not None]
    return any(
        each.lock_options.on_conflict == "join" and task.name in (option_of(each, "name"), each.name) for each in tasks
    )


def _fence_told(task: Task, task_id: str) -> int:
    """The fence of the last run of this call that told its joiners to wait for a later attempt; 0 if none did."""
    # A later run writes it again, so do not read it from a cache.
    word = task.backend.get_task_meta(_word_of(task_id), cache=False)
    return int(word["result"] or 0) if word["status"] == states.STARTED else 0


def _word_of(task_id: str) -> str:
    return f"{task_id}-handed-on"
