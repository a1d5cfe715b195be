"""Asking the holders of one lock to end, and waiting until they have; dropping marks that nobody holds.

If the store gives no answer in time, `StoreError` is raised, and what was asked for may be done all the same.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from celery import Celery

from celery_singleton_lock.operations.rows import Locks, Row, duration, rows_of, shown, worker_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Holder, LockState

logger = logging.getLogger("celery_singleton_lock")

_LOOK_AGAIN = 0.2
# A lease that is renewed always has two thirds of its ttl left, so half of the rest is at least the time to a renewal.
_UNTIL_A_RENEWAL = 0.5
_TO_END = 5.0


def name_of(holder: Holder) -> str:
    """Task id of a holder; of a `Lock`, its hostname and process."""
    return holder.task_id or worker_of(holder)


def as_json(
    key: str, holders: Iterable[Holder], dropped: Sequence[str], *, gone: bool = False, seconds: float = 0.0
) -> dict[str, Any]:
    """A break, planned or done, in the words of the docs."""
    asked = [name_of(holder) for holder in holders]
    return {"key": key, "asked": asked, "dropped": dropped, "gone": gone, "seconds": round(seconds, 3)}


def meant(lock: LockState, name: str | None) -> tuple[list[Holder], list[str]]:
    """The holders of that name; without a name, all of them, and the marks."""
    holders = [holder for holder in lock.leases if name in (None, holder.task_id, worker_of(holder))]
    states = () if name else {row.state for row in rows_of(lock)}
    return holders, [state for state in ("queued", "next", "quiet") if state in states]


def ask(
    locks: Locks, key: str, holders: Iterable[Holder], by: str, *, marks: bool, force: bool = False
) -> tuple[list[Holder], list[str]]:
    """Ask these holders, and no other one that has come since, to end, or free their places; and drop the marks.

    Returns:
        Those that were still there, and the marks that are gone.
    """
    tokens = [holder.token for holder in holders]
    asked, dropped = locks.store.break_lock(key, tokens, by, marks=marks, force=force)
    for holder in asked:
        logger.info("lock.broken key=%s task_id=%s by=%s force=%s", key, holder.task_id, by, force)
    return asked, dropped


def wait_until_gone(
    locks: Locks, key: str, asked: Sequence[Holder], seconds: float | None
) -> tuple[list[Holder], float]:
    """Look again and again, for so many seconds at most; return the holders that are left, and how long it took.

    Without a number, it is the time in which they hear of it and end, if their bodies let them.
    """
    if seconds is None:
        seconds = max(holder.expires_in for holder in asked) * _UNTIL_A_RENEWAL + _TO_END
    began_at, tokens = clock(), {holder.token for holder in asked}
    while True:
        left = [holder for holder in locks.survey(key).holders if holder.token in tokens]
        waited = clock() - began_at
        if not left or waited >= seconds:
            return left, waited
        time.sleep(min(_LOOK_AGAIN, seconds - waited))


def marks_left(surveys: Iterable[LockState]) -> tuple[list[Row], int]:
    """The queued and next marks of locks that nobody holds, and the number of locks that somebody holds."""
    marks, held = list[Row](), 0
    for survey in surveys:
        if survey.leases:
            held += 1
        else:
            marks += [row for row in rows_of(survey) if row.state in ("queued", "next")]
    return marks, held


def drop_marks(locks: Locks, agreed: Sequence[Row]) -> tuple[list[Row], int]:
    """Drop these marks, except those of locks that somebody holds by now; return them, and the number of such locks."""
    calls = {(row.lock.key, row.about.task_id) for row in agreed}
    marks, held = marks_left(locks.surveys_of(sorted({key for key, _ in calls})))
    dropped = [row for row in marks if (row.lock.key, row.about.task_id) in calls]
    for row in dropped:
        # By its task id, so neither a lease nor the mark of a call that has come since is touched.
        locks.store.unmark(row.lock.key, row.about.task_id or "", quiet=False)
    return dropped, held


def break_marks(app: "Celery[Any]", pattern: str) -> int:
    """Do what `break --marks PATTERN` does, for names such as `"shop.*"`; return how many marks are dropped."""
    locks = Locks(app)
    marks, _ = marks_left(locks.surveys(pattern))
    dropped, _ = drop_marks(locks, marks)
    return len(dropped)


# For people.


def plan_text(holders: Sequence[Holder], dropped: Sequence[str], *, force: bool) -> str:
    """The holders and marks of a break, and its risk."""
    lines = []
    if holders:
        names = shown(", ".join(map(name_of, holders)))
        lines.append(f"To be {'freed at once' if force else 'asked to end'}: {names}")
    if holders and force:
        lines.append("A body that is still alive keeps running beside the next one, at least until its next renewal.")
    if dropped:
        lines.append(f"To be dropped: {', '.join(dropped)}")
    return "\n".join(lines)


def outcome_text(
    asked: Sequence[Holder], dropped: Sequence[str], left: Sequence[Holder], seconds: float, *, force: bool, app: str
) -> str:
    """What has come of a break; *app* is what to give as `-A`."""
    if not asked:
        return f"Dropped: {', '.join(dropped)}." if dropped else "Nothing was done: all that was to be broken is gone."
    if force:
        return "Freed. A body that is still alive learns of it at its next renewal, and ends with LockLost."
    if not left:
        return f"Free after {duration(seconds)}."
    ends_in = duration(max(holder.expires_in for holder in left))
    lines = [
        f"Not free after {duration(seconds)}. If the process is dead, its lease ends in {ends_in}.",
        "A body that catches LockLost, as `except Exception` does, that lets no other thread run, or that is only",
        "warned (lock_on_lost='warn'), runs to its end.",
    ]
    if ids := [shown(holder.task_id) for holder in left if holder.task_id]:
        lines.append("To end it with its process:")
        lines += [f"  celery -A {shown(app)} control terminate SIGKILL {task_id}" for task_id in ids]
    else:
        lines.append("The holder is a Lock, not a task: its program has to release it.")
    return "\n".join(lines)
