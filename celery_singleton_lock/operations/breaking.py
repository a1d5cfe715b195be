"""Asking the holders of one lock to end, and waiting until they have; dropping marks that nobody holds."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.operations.inventory import Locks, Row, duration, row_of_holder, rows_of, shown
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.inventory import Survey
from celery_singleton_lock.stores.records import Holder

logger = logging.getLogger("celery_singleton_lock")

_LOOK_AGAIN = 0.2
# A lease that is renewed always has two thirds of its ttl left, so half of the rest is at least the time to a renewal.
_UNTIL_A_RENEWAL = 0.5
_TO_END = 5.0


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
        """As JSON, with the names of the docs."""
        return {
            "key": self.key,
            "asked": self.asked,
            "dropped": self.dropped,
            "gone": self.gone,
            "seconds": round(self.seconds, 3),
        }


def name_of(survey: Survey, holder: Holder) -> str:
    """Task id of a holder; for a `Lock`, its hostname and process."""
    return holder.task_id or row_of_holder(survey, holder).worker


def meant(survey: Survey, name: str | None) -> list[Holder]:
    """The holders of that name; without a name, all holders."""
    holders = [holder for holder in survey.holders if not holder.is_on_hold]
    return [holder for holder in holders if name in (None, holder.task_id, row_of_holder(survey, holder).worker)]


def preview(survey: Survey, name: str | None) -> Broken:
    """The holders and marks that a break would be about."""
    dropped = () if name else dict.fromkeys(row.state for row in rows_of(survey) if row.state != "held")
    order = [state for state in ("queued", "next", "quiet") if state in dropped]
    return Broken(survey.key, [name_of(survey, holder) for holder in meant(survey, name)], list(order))


def ask(locks: Locks, survey: Survey, name: str | None, by: str, *, force: bool) -> Broken:
    """Ask the holders of that name to end; without a name, all of them, and drop the marks. Or free the places at once.

    Raises:
        StoreError: No answer in time. It may be done all the same.
    """
    tokens = [None] if name is None else [holder.token for holder in meant(survey, name)]
    answers = [locks.store.break_lock(survey.key, token, by, force=force) for token in tokens]
    holders = tuple(holder for answer in answers for holder in answer.holders)
    for holder in holders:
        event = "lock.broken key=%s task_id=%s by=%s force=%s"
        logger.info(event, survey.key, holder.task_id, by, force)
    return Broken(
        survey.key,
        [name_of(survey, holder) for holder in holders],
        [state for answer in answers for state in answer.dropped],
        gone=force or not holders,
        left=() if force else holders,
    )


def patience_with(holders: tuple[Holder, ...]) -> float:
    """Seconds in which the holders that were asked hear of it and end, if their bodies let them."""
    return max((holder.expires_in for holder in holders), default=0.0) * _UNTIL_A_RENEWAL + _TO_END


def wait_until_gone(locks: Locks, broken: Broken, seconds: float) -> Broken:
    """Look again and again until the holders that were asked have ended, for so many seconds at most.

    Raises:
        StoreError: No answer in time.
    """
    began_at, asked = clock(), {holder.token for holder in broken.left}
    while True:
        survey = locks.survey(broken.key)
        left = tuple(holder for holder in survey.holders if holder.token in asked)
        waited = clock() - began_at
        if not left or waited >= seconds:
            return Broken(broken.key, broken.asked, broken.dropped, gone=not left, seconds=waited, left=left)
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
        """As JSON, with the names of the docs."""
        dropped = [{"key": row.key, "state": row.state, "task_id": row.task_id} for row in self.marks]
        return {"pattern": self.pattern, "dropped": dropped, "held": self.held}


def marks_left(surveys: Iterable[Survey], pattern: str) -> LeftMarks:
    """The marks that can be dropped because nobody holds their locks.

    Raises:
        StoreError: No answer in time.
    """
    marks, held = list[Row](), 0
    for survey in surveys:
        if meant(survey, None):
            held += 1
        else:
            marks += _marks_of(survey)
    return LeftMarks(pattern, marks, held)


def drop_marks(locks: Locks, agreed: LeftMarks) -> LeftMarks:
    """Drop these marks, except those of locks that somebody holds by now, and say which.

    Raises:
        StoreError: No answer in time. Some are dropped.
    """
    calls = {(row.key, row.task_id) for row in agreed.marks}
    dropped, held = list[Row](), agreed.held
    for survey in locks.surveys_of(sorted({key for key, _ in calls})):
        if meant(survey, None):
            held += 1
            continue
        for row in _marks_of(survey):
            if (row.key, row.task_id) in calls:
                # By its task id, so neither a lease nor the mark of a call that has come since is touched.
                locks.store.unmark(row.key, row.task_id or "", quiet=False)
                dropped.append(row)
    return LeftMarks(agreed.pattern, dropped, held)


def _marks_of(survey: Survey) -> list[Row]:
    return [row for row in rows_of(survey) if row.state in ("queued", "next")]


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
    """Say that there is nothing to break."""
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
        lines.append("A body that is still alive goes on, beside the next one, until its next renewal at the earliest.")
    if broken.dropped:
        lines.append(f"To be dropped: {', '.join(broken.dropped)}")
    return "\n".join(lines)


def outcome(broken: Broken, app: str, *, force: bool) -> str:
    """The result; *app* is what to give as `-A`."""
    if not broken.gone:
        return _not_free(broken, app)
    if not broken.asked:
        return f"Dropped: {', '.join(broken.dropped)}." if broken.dropped else "Nobody was there any more."
    if force:
        return "Freed. A body that is still alive learns of it at its next renewal, and ends with LockLost."
    return f"Free after {duration(broken.seconds)}."


def _not_free(broken: Broken, app: str) -> str:
    left = max(holder.expires_in for holder in broken.left)
    ids = [holder.task_id for holder in broken.left if holder.task_id]
    lines = [
        f"Not free after {duration(broken.seconds)}. If the process is dead, its lease ends in {duration(left)}.",
        "A body that lets no other thread run, or that is only warned (lock_on_lost='warn'), goes on to its end.",
    ]
    if ids:
        lines.append("To end it with its process:")
    else:
        lines.append("It is no task's but a Lock's, which keeps it until its program releases it.")
    return "\n".join(
        [*lines, *(f"  celery -A {shown(app)} control terminate SIGKILL {shown(task_id)}" for task_id in ids)]
    )
