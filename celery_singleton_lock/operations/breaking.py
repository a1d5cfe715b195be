"""Asking the holders of one lock to end, and waiting until they have; dropping marks that nobody holds.

If the store gives no answer in time, `StoreError` is raised, and what was asked for may be done all the same.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from celery_singleton_lock.operations.inventory import Locks, Row, duration, rows_of, shown, worker_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.inventory import LockState
from celery_singleton_lock.stores.records import Holder

logger = logging.getLogger("celery_singleton_lock")

_LOOK_AGAIN = 0.2
# A lease that is renewed always has two thirds of its ttl left, so half of the rest is at least the time to a renewal.
_UNTIL_A_RENEWAL = 0.5
_TO_END = 5.0
_OF_A_LOCK = "The holder is a Lock, not a task: its program has to release it."


@dataclass(frozen=True)
class Broken:
    """The result of a break.

    Attributes:
        key: The lock key.
        asked: Task ids of the holders that were asked; for a `Lock`, its hostname and process.
        dropped: Marks that are gone.
        gone: None of those that were asked holds the key any more.
        seconds: How long that took.
        left: The holders that still hold it.
    """

    key: str
    asked: list[str]
    dropped: list[str]
    gone: bool = False
    seconds: float = 0.0
    left: tuple[Holder, ...] = ()

    @property
    def was_there(self) -> bool:
        """Whether there was anything to break."""
        return bool(self.asked or self.dropped)

    def as_json(self) -> dict[str, Any]:
        facts = {"key": self.key, "asked": self.asked, "dropped": self.dropped}
        return {**facts, "gone": self.gone, "seconds": round(self.seconds, 3)}


def name_of(holder: Holder) -> str:
    """Task id of a holder; for a `Lock`, its hostname and process."""
    return holder.task_id or worker_of(holder)


def meant(survey: LockState, name: str | None) -> list[Holder]:
    """The holders of that name; without a name, all holders."""
    return [holder for holder in survey.leases if name in (None, holder.task_id, worker_of(holder))]


def preview(survey: LockState, name: str | None) -> Broken:
    """The holders and marks that a break would be about."""
    states = () if name else {row.state for row in rows_of(survey)}
    dropped = [state for state in ("queued", "next", "quiet") if state in states]
    return Broken(survey.key, list(map(name_of, meant(survey, name))), dropped)


def ask(locks: Locks, survey: LockState, name: str | None, by: str, *, force: bool) -> Broken:
    """Ask the holders of that name to end; without a name, all of them, and drop the marks; or free the places."""
    tokens = [None] if name is None else [holder.token for holder in meant(survey, name)]
    answers = [locks.store.break_lock(survey.key, token, by, force=force) for token in tokens]
    holders = tuple(holder for answer in answers for holder in answer.holders)
    for holder in holders:
        event = "lock.broken key=%s task_id=%s by=%s force=%s"
        logger.info(event, survey.key, holder.task_id, by, force)
    return Broken(
        survey.key,
        list(map(name_of, holders)),
        [state for answer in answers for state in answer.dropped],
        gone=force or not holders,
        left=() if force else holders,
    )


def wait_until_gone(locks: Locks, broken: Broken, seconds: float | None) -> Broken:
    """Look again and again until the holders that were asked have ended, for so many seconds at most.

    Without a number, it is the time in which they hear of it and end, if their bodies let them.
    """
    if seconds is None:
        seconds = max(holder.expires_in for holder in broken.left) * _UNTIL_A_RENEWAL + _TO_END
    began_at, asked = clock(), {holder.token for holder in broken.left}
    while True:
        left = tuple(holder for holder in locks.survey(broken.key).holders if holder.token in asked)
        waited = clock() - began_at
        if not left or waited >= seconds:
            return replace(broken, gone=not left, seconds=waited, left=left)
        time.sleep(min(_LOOK_AGAIN, seconds - waited))


# The marks of calls, in bulk.


@dataclass(frozen=True)
class LeftMarks:
    """Marks of queued and next calls that nobody holds.

    Attributes:
        pattern: The glob for lock names.
        marks: One row for each.
        held: How many locks of such names are left alone because somebody holds them.
    """

    pattern: str
    marks: list[Row]
    held: int

    def as_json(self) -> dict[str, Any]:
        dropped = [{"key": row.key, "state": row.state, "task_id": row.task_id} for row in self.marks]
        return {"pattern": self.pattern, "dropped": dropped, "held": self.held}


def marks_left(surveys: Iterable[LockState], pattern: str) -> LeftMarks:
    """The marks that can be dropped because nobody holds their locks."""
    marks, held = list[Row](), 0
    for survey in surveys:
        if survey.leases:
            held += 1
        else:
            marks += [row for row in rows_of(survey) if row.state in ("queued", "next")]
    return LeftMarks(pattern, marks, held)


def drop_marks(locks: Locks, agreed: LeftMarks) -> LeftMarks:
    """Drop these marks, except those of locks that somebody holds by now, and say which."""
    calls = {(row.key, row.task_id) for row in agreed.marks}
    now = marks_left(locks.surveys_of(sorted({key for key, _ in calls})), agreed.pattern)
    dropped = [row for row in now.marks if (row.key, row.task_id) in calls]
    for row in dropped:
        # By its task id, so neither a lease nor the mark of a call that has come since is touched.
        locks.store.unmark(row.key, row.task_id or "", quiet=False)
    return LeftMarks(agreed.pattern, dropped, agreed.held + now.held)


# For people.


def marks_text(left: LeftMarks, *, is_done: bool) -> str:
    """How many marks are dropped, and how many locks are left alone."""
    locks = len({row.key for row in left.marks})
    verb = "Dropped marks" if is_done else "Marks to be dropped"
    lines = [f"{verb}: {len(left.marks)}, of {locks} locks that nobody holds." if locks else "Nothing to drop."]
    if left.held:
        lines.append(f"Locks left alone because they are held: {left.held}.")
    return "\n".join(lines)


def nothing(key: str, name: str | None) -> str:
    if name is None:
        return f"Nothing to break: nobody holds {shown(key)}, and there are no marks."
    return f"Nothing to break: {shown(name)} does not hold {shown(key)}."


def planned(broken: Broken, *, force: bool) -> str:
    """The holders and marks of a break, and its risk."""
    lines = []
    if broken.asked:
        verb = "To be freed at once" if force else "To be asked to end"
        lines.append(f"{verb}: {shown(', '.join(broken.asked))}")
    if broken.asked and force:
        lines.append("A body that is still alive keeps running beside the next one, at least until its next renewal.")
    if broken.dropped:
        lines.append(f"To be dropped: {', '.join(broken.dropped)}")
    return "\n".join(lines)


def outcome(broken: Broken, app: str, *, force: bool) -> str:
    """The result; *app* is what to give as `-A`."""
    if not broken.gone:
        return _not_free(broken, app)
    if not broken.asked:
        return f"Dropped: {', '.join(broken.dropped)}." if broken.dropped else "There was no holder and no mark left."
    if force:
        return "Freed. A body that is still alive learns of it at its next renewal, and ends with LockLost."
    return f"Free after {duration(broken.seconds)}."


def _not_free(broken: Broken, app: str) -> str:
    left = max(holder.expires_in for holder in broken.left)
    ids = [shown(holder.task_id) for holder in broken.left if holder.task_id]
    last = "To end it with its process:" if ids else _OF_A_LOCK
    return "\n".join(
        [
            f"Not free after {duration(broken.seconds)}. If the process is dead, its lease ends in {duration(left)}.",
            "A body that lets no other thread run, or that is only warned (lock_on_lost='warn'), runs to its end.",
            last,
            *(f"  celery -A {shown(app)} control terminate SIGKILL {task_id}" for task_id in ids),
        ]
    )
