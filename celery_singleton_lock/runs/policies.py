"""The fate of a run that finds its key held: a class for each policy."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from billiard.exceptions import WorkerLostError
from celery import Task, states
from celery._state import get_current_task
from celery.exceptions import Ignore, Retry

from celery_singleton_lock.leases.lease import has_locked, held_here
from celery_singleton_lock.log import log
from celery_singleton_lock.options import OnConflict, option_of
from celery_singleton_lock.runs.delivery import ITEM, state_for, state_of
from celery_singleton_lock.runs.endings import final_result, has_result, why_unreadable
from celery_singleton_lock.runs.notes import NEXT_RUN
from celery_singleton_lock.runs.requeue import JOINED, NEXT, REFUSED, broker_delays, delay_in_line, delay_of, requeue
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Done, Grant, Holder, HolderState, LockState, Succession

# The part of a time limit that a run may wait in its place; the rest is for the body.
_SHARE = 1 / 4

_NO_LIMITS: tuple[float | None, float | None] = None, None
_FOR_EVER = float("inf")
_limits_of_the_worker = _NO_LIMITS


class Ended(NamedTuple):
    """The run has ended without its body, with this result or error."""

    result: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class Asks:
    """The run asks for its lock."""


ASKS = Asks()


class Policy(ABC):
    """The fate of a run that finds its key held."""

    # Its runs wait in their places, so they must not wait for a message, which may need that very place.
    occupies_a_slot = False
    # By which rule its runs become the successor, if they do.
    kind: Succession | None = None
    # Its messages keep their turns in the queue of the lock while they are in the broker.
    takes_turns = False

    def without_broker(self, run: Run) -> "Policy":  # noqa: ARG002
        """The nearest policy for a run whose message cannot go back to the broker."""
        return self

    def for_later_attempt(self) -> "Policy":
        """The nearest policy for a run that would be lost for nothing, because no call runs in its place."""
        return self

    def before_acquire(self, run: Run) -> Ended | Asks:  # noqa: ARG002
        """End the run before it asks for its lock, if the policy can."""
        return ASKS

    def on_conflict(self, run: Run, conflict: Conflict) -> Grant | Conflict | Done:  # noqa: ARG002
        """After the first refusal: ask for the lock once more, in the policy's own way; the last answer."""
        return conflict

    @abstractmethod
    def finish(self, run: Run, conflict: Conflict) -> Any:
        """End the run, or send it back to the broker.

        Returns:
            What the run returns in place of its body's result.

        Raises:
            LockHeld, Ignore, Retry: The other ways to end.
        """


class Skip(Policy):
    """`skip`: the run is not done, and says which holder it left the work to."""

    def for_later_attempt(self) -> Policy:
        return POLICIES["reschedule"]

    def finish(self, run: Run, conflict: Conflict) -> Any:
        holder = conflict.first
        run.report_conflict(holder, "skipped")
        # A result is read much later, so it does not say for how long.
        return run.skip(str(holder.refusal).partition(";")[0], "skipped", holder.task_id)


class Raise(Policy):
    """`raise`: the run fails."""

    def for_later_attempt(self) -> Policy:
        return POLICIES["reschedule"]

    def finish(self, run: Run, conflict: Conflict) -> Any:
        _raise_held(run, conflict.first)


class Requeues(Policy):
    """Its runs wait in the broker, and have no other way to wait."""

    def without_broker(self, run: Run) -> Policy:
        return POLICIES["raise" if run.request.is_eager else "wait"]


class Reschedule(Requeues):
    """`reschedule`: back to the broker, where it waits for its turn."""

    takes_turns = True

    def finish(self, run: Run, conflict: Conflict) -> Any:
        """Requeue it, unless it has waited long enough."""
        run.notes.rank = conflict.rank
        if _waiting_left(run, conflict) < REFUSED.first:
            _raise_held(run, conflict.first)
        _requeue(run, conflict)


class Wait(Policy):
    """`wait`: first come, first served, in a slot of the pool."""

    occupies_a_slot = True

    def on_conflict(self, run: Run, conflict: Conflict) -> Grant | Conflict | Done:
        """Wait in line, unless the calling code has the lock."""
        if held_here(run.key) is not None or has_locked(run.key):
            return conflict
        with _waiting_in_place(run, conflict.first):
            return run.lease.wait(min(_waiting_left(run, conflict), longest_wait(run)))

    def finish(self, run: Run, conflict: Conflict) -> Any:
        """Give up, or requeue it to wait again, because each delivery has its full time limit."""
        if not run.can_be_requeued or _waiting_left(run, conflict) < REFUSED.first:
            _raise_held(run, conflict.first)
        if run.lease.unreleased:
            # The turn ends with this process. The message comes back to its place by its first refusal.
            run.lease.release()
        _requeue(run, replace(conflict, rank=0))


class NextRun(Requeues):
    """`rerun` and `replace`: the call that was published last runs next; older ones end in its favour."""

    def __init__(self, kind: Succession) -> None:
        self.kind = kind

    def finish(self, run: Run, conflict: Conflict) -> Any:
        """Requeue it, or end it like a skipped run that names the call which runs in its place."""
        successor = conflict.successor
        if successor is None or successor == run.task_id:
            # A later attempt of a run that has begun has asked for nothing. It takes no other call's turn.
            _requeue(run, conflict, newest="next" if run.notes.newest or successor else "")
        coming = replace(conflict.first, state=HolderState.NEXT, task_id=successor, token="", fence=0)
        run.report_conflict(next((one for one in conflict.holders if one.task_id == successor), coming), "superseded")
        return run.skip(f"lock key={run.key}: task_id={successor} runs in place of this one", "superseded", successor)


class Join(Requeues):
    """`join`: the holder's result or error is the run's as well."""

    def before_acquire(self, run: Run) -> Ended | Asks:
        """Take the result of the run that was joined, if that has ended."""
        joins = run.notes.joins
        if not joins:
            return ASKS
        (state,) = run.store.survey([run.key])
        for holder in state.holders:
            if holder.task_id == joins:
                _join(run, holder, **(_joining(run, holder) if holder.fence != run.notes.joins_fence else {}))
        # Only now: if a task id is used again, the result of an earlier run is there while this run holds the lock.
        return _result_of(run, joins, state)

    def finish(self, run: Run, conflict: Conflict) -> Any:
        holder = conflict.first
        _join(run, holder, **(_joining(run, holder, conflict.at) if has_result(run.task, holder) else _JOINS_NOBODY))


POLICIES: dict[OnConflict, Policy] = {
    "skip": Skip(),
    "raise": Raise(),
    "reschedule": Reschedule(),
    "wait": Wait(),
    "join": Join(),
    "rerun": NextRun("rerun"),
    "replace": NextRun("replace"),
}


def _raise_held(run: Run, holder: Holder) -> NoReturn:
    run.report_conflict(holder, "raised")
    raise holder.refusal


def _requeue(run: Run, conflict: Conflict, **notes: Any) -> NoReturn:
    holder = conflict.first
    run.report_conflict(holder, "rescheduled")
    is_next = conflict.successor == run.task_id
    rank = NEXT_RUN if is_next and not broker_delays(run.task.app) else conflict.rank
    if rank:
        left = _waiting_left(run, conflict)
        # Whoever gives up has done so by now.
        delay = delay_in_line(run, left if left >= REFUSED.first else _FOR_EVER)
    else:
        delay = delay_of(run, NEXT if is_next else REFUSED, holder.expires_in)
    requeue(run, holder.refusal, delay, rank=rank, **notes)


def _waiting_left(run: Run, conflict: Conflict) -> float:
    """Seconds until it has waited for `lock_wait_timeout`, by the store's clock, counted from its first refusal."""
    waited = (conflict.at - run.claim.refused_at) / 1_000_000
    return float("inf") if run.options.wait_timeout is None else run.options.wait_timeout - waited


# Waiting in place, while a time limit goes on.


def remember_limits(worker: Any) -> None:
    """Keep the limits of the command line; the pool's processes are forks of this one, and do not get it otherwise."""
    global _limits_of_the_worker  # noqa: PLW0603 (a process has one)
    _limits_of_the_worker = worker.time_limit, worker.soft_time_limit


def longest_wait(run: Run) -> float:
    """Seconds for which the run may still wait in its place; infinite if no time limit ends it there."""
    # For an item, the time limit of its map goes on.
    timed = run.task
    request = run.request
    if run.way is ITEM:
        timed = get_current_task()
        request = timed.request
    # Each is chosen as a worker chooses it.
    hard, soft = request.timelimit or _NO_LIMITS
    hard = hard or timed.time_limit or _limits_of_the_worker[0]
    soft = soft or timed.soft_time_limit or _limits_of_the_worker[1]
    if not (hard or soft) or request.is_eager:
        return _FOR_EVER
    state = state_of(request)
    waited = state.waited if state is not None else 0.0
    return min(limit for limit in (hard, soft) if limit) * _SHARE - waited - run.age


@contextmanager
def _waiting_in_place(run: Run, holder: Holder) -> Iterator[None]:
    """Say that the run waits, and that it waits no longer if it is granted its key; count the time."""
    log.write(logging.INFO, "lock.waiting", key=run.key, task_id=run.task_id, holder=holder.task_id)
    run.send_event("lock-waiting", key=run.key, holder=holder.task_id)
    try:
        yield
    finally:
        if run.way is ITEM:
            # The items of a map share its time limit.
            state_for(get_current_task().request).waited += run.age
    if run.lease.fence:
        run.send_event("lock-acquired", key=run.key, waited=run.lease.waited)


# Ending with the result of another run.

# A lease is released before the result is stored. If it is still missing so
# much later, there will be none: the holder has died, or keeps no results.
_RESULT_GRACE = 1.5
_JOINS_NOBODY = {"joins": "", "joins_fence": 0, "joins_since": 0, "free_since": 0}


def _joining(run: Run, holder: Holder, at: int = 0) -> dict[str, Any]:
    joins = str(holder.task_id)
    # If there is no end of an earlier call with its id, any end is its own, and no two clocks have to be compared.
    since = holder.published if final_result(run.task, joins) else 0
    # A run that has not begun has no fence yet; its fence will be greater than the time of the store now.
    fence = at if holder.goes_before else holder.fence
    return {"joins": joins, "joins_fence": fence, "joins_since": since, "free_since": 0}


def _join(run: Run, holder: Holder, **notes: Any) -> NoReturn:
    run.report_conflict(holder, "joined")
    requeue(run, holder.refusal, delay_of(run, JOINED), **notes)


def _result_of(run: Run, joins: str, state: LockState) -> Ended | Asks:
    kept = final_result(run.task, joins, run.notes.joins_since) or {}
    outcome = kept.get("status")
    result = kept.get("result")
    if outcome == states.SUCCESS:
        return Ended(result)
    if outcome == states.REVOKED:
        run.revoke(f"lock key={run.key}: task_id={joins}, which this run had joined, was revoked", "joined", joins)
        return Ended()
    if outcome == states.FAILURE:
        return ASKS if isinstance(result, WorkerLostError) else Ended(error=result)
    _wait_for_result(run, joins, state)
    return ASKS


def _wait_for_result(run: Run, joins: str, state: LockState) -> None:
    """Requeue it, unless the run that was joined counts as dead: it has had no lock for too long."""
    # The retry of that run, or the tasks that continue it, may end much later, but a message that is lost never
    # comes. A state that an earlier run with the same task id has left says nothing about this run.
    goes_on = 0 < run.notes.joins_fence <= _fence_told(run.task, joins)
    patience = run.options.queue_ttl if goes_on else _RESULT_GRACE
    # Measured by the clock of the store, because the call may come to another host, with another clock, each time.
    free_since = run.notes.free_since or state.at
    if state.at - free_since < patience * 1_000_000:
        _join(run, Holder.former(run.key, joins), free_since=free_since)


# What calls that have joined a run hear of it.


@contextmanager
def telling_joiners(run: Run) -> Iterator[None]:
    """Tell the calls that have joined the run that later attempts are published inside, which may hold no lock yet."""
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
        # Under another id than its result, because the last of those tasks stores its own states there.
        try:
            # STARTED may be overwritten: a later run of the call writes this again, with its own fence.
            run.task.backend.store_result(_word_of(run.task_id), run.lease.fence, states.STARTED)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises)
            # Then those calls ask for the lock themselves, sooner than they need to.
            log.write(logging.WARNING, "lock.result_failed", "%s", error, key=run.key, task_id=run.task_id)


def _may_be_joined(task: Task) -> bool:
    """There may be joiners: this app knows which of its tasks have that policy and a lock of this name."""
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
