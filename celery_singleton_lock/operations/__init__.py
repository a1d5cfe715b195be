"""Finds the lock that an operator names, and breaks it."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import click
from celery import Celery

from celery_singleton_lock.definition.options import Lockable
from celery_singleton_lock.log import log, shown
from celery_singleton_lock.operations.rows import Locks, Row, a_few, duration, in_json, rows_of, worker_of
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Holder, LockState

_LOOK_AGAIN = 0.2  # seconds
# The next renewal comes within 1/3 of the TTL. At least 2/3 of the TTL is left, so half of the rest is enough.
_UNTIL_A_RENEWAL = 0.5
_TO_END = 5.0  # seconds for a run to end after `LockLost`


def _name_of(holder: Holder) -> str:
    return holder.task_id or worker_of(holder.hostname, holder.pid)


@dataclass(frozen=True)
class Plan:
    """What a break is to end in one lock, or has ended."""

    key: str
    name: str | None = None  # task id, or hostname:pid; None: everything but the turns of living processes
    holders: Sequence[Holder] = ()
    dropped: Sequence[str] = ()  # some of `queued`, `next`, `cooldown` and `turns`
    turns: Sequence[Holder] = ()

    @classmethod
    def of(cls, lock: LockState, name: str | None = None) -> "Plan":
        holders = [each for each in lock.holders if name in (None, each.task_id, worker_of(each.hostname, each.pid))]
        # A break of one call keeps the cool-down after its run.
        marks = [*lock.marks, *lock.places] if name is None else [each for each in lock.marks if each.task_id == name]
        states = {each.state for each in marks}
        # Without a name, drop turns only if nobody holds the lock: the release of a holder skips dead turns anyway.
        turns = [turn for turn in lock.turns if (turn.task_id == name if name else not lock.holders)]
        dropped = [state for state in ("queued", "next", "cooldown") if state in states] + ["turns"] * bool(turns)
        return cls(lock.key, name, holders, dropped, turns)

    def __bool__(self) -> bool:
        return bool(self.holders or self.dropped)

    def as_json(self, *, gone: bool = False, seconds: float = 0.0) -> dict[str, Any]:
        asked = [_name_of(holder) for holder in self.holders]
        dropped = list(map(in_json, self.dropped))
        return {"key": self.key, "asked": asked, "dropped": dropped, "gone": gone, "seconds": round(seconds, 3)}

    def text(self, *, force: bool) -> str:
        lines = []
        if self.holders:
            names = shown(", ".join(map(_name_of, self.holders)))
            lines.append(f"To be {'freed at once' if force else 'asked to stop'}: {names}")
            risk = "A body that is still alive keeps running beside the next one, at least until its next renewal."
            lines += [risk] if force else []
        if self.dropped:
            of_dead = "" if self.name or not self.turns else f" ({len(self.turns)}; those of living processes stay)"
            lines.append(f"To be dropped: {', '.join(self.dropped)}{of_dead}")
        return "\n".join(lines)


def ask(locks: Locks, plan: Plan, by: str, *, force: bool = False) -> Plan:
    """Carry out the plan. With *force*, free the places at once. Return what was done."""
    marks = bool(plan.dropped) and plan.name is None
    turns = ["turns"] if marks and plan.turns and _drop_dead_turns(locks, plan.key) else []
    tokens = [holder.token for holder in plan.holders]
    asked, dropped = locks.inventory.break_lock(plan.key, tokens, by, marks=marks, force=force)
    for holder in asked:
        log.info("lock.broken", key=plan.key, task_id=holder.task_id, by=by, force=force)
    if plan.name is not None and plan.dropped:
        locks.store.unmark(plan.key, plan.name)
        for turn in plan.turns:
            # The message of a living call carries the time of its turn (`rank`), so the call gets its position back.
            locks.store.release(Claim(plan.key, turn.token, ttl=1.0), None)
        left = Plan.of(locks.survey(plan.key), plan.name).dropped
        dropped = [word for word in plan.dropped if word not in left]
    return replace(plan, holders=asked, dropped=[*dropped, *turns])


def _drop_dead_turns(locks: Locks, key: str) -> bool:
    """Wake the next turns, and drop each turn without a listener. Return whether any was dropped."""
    has_dropped = False
    while True:
        locks.store.wake_next(key)
        dead = [turn for turn in locks.survey(key).turns if turn.is_unheard]
        for turn in dead:
            locks.store.release(Claim(key, turn.token, ttl=1.0), None)
        if not dead:
            return has_dropped
        has_dropped = True


def wait_until_gone(locks: Locks, done: Plan, seconds: float | None) -> tuple[list[Holder], float]:
    """Return the holders that are left, and the seconds that passed."""
    if seconds is None:
        seconds = max(holder.expires_in for holder in done.holders) * _UNTIL_A_RENEWAL + _TO_END
    began_at = clock()
    tokens = {holder.token for holder in done.holders}
    while True:
        left = [holder for holder in locks.survey(done.key).holders if holder.token in tokens]
        waited = clock() - began_at
        if not left or waited >= seconds:
            return left, waited
        time.sleep(min(_LOOK_AGAIN, seconds - waited))


def marks_left(surveys: Iterable[LockState]) -> tuple[list[Row], int]:
    """The queued and next marks of locks that nobody holds, and the number of held locks."""
    found = list(surveys)
    unheld = [row for survey in found if not survey.holders for row in rows_of(survey)]
    return [row for row in unheld if row.about.is_queued_or_next], sum(bool(survey.holders) for survey in found)


def drop_marks(locks: Locks, agreed: Iterable[Row]) -> tuple[list[Row], int]:
    """Drop the *agreed* marks of locks that nobody holds now.

    Returns the dropped marks, and the number of held locks.
    """
    calls = {(row.lock.key, row.about.task_id) for row in agreed}
    marks, held = marks_left(locks.surveys_of(sorted({key for key, _ in calls})))
    dropped = [row for row in marks if (row.lock.key, row.about.task_id) in calls]
    for row in dropped:
        # By the task id, so that a later call keeps its mark.
        locks.store.unmark(row.lock.key, row.about.task_id or "", ends_cooldown=False)
    return dropped, held


def break_marks(app: "Celery[Any]", pattern: str) -> int:
    """Drop the marks of locks that nobody holds, as `break --marks PATTERN` does. Return how many were dropped.

    *pattern* is a glob for lock names, such as `"shop.*"`.
    """
    locks = Locks(app)
    dropped, _ = drop_marks(locks, marks_left(locks.surveys(pattern))[0])
    return len(dropped)


def named(
    locks: Locks, what: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[LockState, str | None]:
    """The state of the lock, and the task id if *what* names a call. For a call in no lock, the state is empty."""
    what = what.strip().removesuffix("…")
    if not what:
        raise click.UsageError("Give a lock key, a task with its arguments, or a task id.")
    if args is None and kwargs is None and what not in locks.app.tasks:
        if locks.is_key(what):
            return locks.survey(what), None
        found = _found(locks, what)
        if len(found) > 1:
            which = a_few([shown(name) for name in found], most=10)
            raise click.UsageError(f"{what!r} is the beginning of several names: {which}. Give more of one of them.")
        if found:
            return next(iter(found.values()))
        if set("{*?") & set(what):
            # Otherwise a pattern, or a key with another prefix, would be taken for a task id.
            raise click.UsageError(
                f"{what!r} is neither a lock key of this app nor a task id. `list --wide [PATTERN]` shows both; `break "
                "--marks PATTERN` drops the marks of locks that nobody holds."
            )
        return LockState(what), what
    task = _task_named(locks.app.tasks, what)
    try:
        key = task.lock_key_of_some(*(args or ()), **(kwargs or {}))
    except (TypeError, ValueError) as error:
        advice = "give the arguments that make its key, as -a '[7]' or -k '{...}'"
        raise click.UsageError(f"The task {task.name!r} cannot be called like this: {error}; {advice}") from error
    return locks.survey(key), None


def _found(locks: Locks, start: str) -> dict[str, tuple[LockState, str | None]]:
    """The locks and calls that *start* abbreviates, by key or task id. *start* may also begin the digest in a key."""
    found = dict[str, tuple[LockState, str | None]]()
    for row in locks.rows(with_turns=True):
        key = row.lock.key
        task_id = row.about.task_id or ""
        if key.startswith(start) or key.rpartition(":")[2].startswith(start):
            found[key] = row.lock, None
        if task_id.startswith(start):
            found.setdefault(task_id, (row.lock, task_id))
    # A full name is not ambiguous.
    return {start: found[start]} if start in found else found


def _task_named(tasks: Mapping[str, Any], name: str) -> Any:
    if name not in tasks:
        near = sorted(each for each in tasks if name in each)[:3] or get_close_matches(name, tasks, n=1)
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise click.UsageError(f"There is no task {name!r} in this app.{meant}")
    if not isinstance(tasks[name], Lockable):
        raise click.UsageError(f"The task {name!r} is not a SingletonTask, so it has no locks.")
    return tasks[name]


def outcome_text(done: Plan, left: Sequence[Holder], seconds: float, *, force: bool, app: str) -> str:
    if not done:
        return "Nothing was done: the holder, mark or turn is gone, or the turn's process is alive."
    if not done.holders:
        return f"Dropped: {', '.join(done.dropped)}."
    if force:
        return "Freed. A body that is still alive learns of it at its next renewal, and does as lock_on_lost says."
    if not left:
        return f"Free after {duration(seconds)}."
    ends_in = duration(max(holder.expires_in for holder in left))
    lines = [
        f"Not free after {duration(seconds)}. If the process is dead, its lease ends in {ends_in}.",
        "A body runs to its end if it catches LockLost, as `except Exception` does, if it lets no other thread run,",
        "or if it is only warned (lock_on_lost='warn').",
    ]
    if ids := [shown(holder.task_id) for holder in left if holder.task_id]:
        lines.append("To end it with its process:")
        lines += [f"  celery -A {shown(app)} control terminate SIGKILL {task_id}" for task_id in ids]
    else:
        lines.append("The holder is a Lock, not a task: its program has to release it.")
    return "\n".join(lines)
