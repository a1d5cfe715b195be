"""Asking the holders of one lock to end, and waiting until they have; dropping marks that nobody holds.

If the store gives no answer in time, `StoreError` is raised, and what was asked for may be done all the same.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_singleton_lock.operations.rows import Locks, Row, duration, rows_of, shown, worker_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Holder, LockState

logger = logging.getLogger("celery_singleton_lock")

_LOOK_AGAIN = 0.2
# A lease that is renewed always has two thirds of its ttl left, so half of the rest is at least the time to a renewal.
_UNTIL_A_RENEWAL = 0.5
_TO_END = 5.0


@dataclass(frozen=True)
class Break:
    """A break, planned or done.

    Attributes:
        key: The lock key.
        holders: Those that are asked.
        dropped: Marks that are gone.
        left: The holders that still hold it.
        gone: None of those that were asked holds the key any more.
        seconds: How long that took.
    """

    key: str
    holders: Sequence[Holder]
    dropped: Sequence[str]
    left: Sequence[Holder] = ()
    gone: bool = False
    seconds: float = 0.0

    @property
    def asked(self) -> list[str]:
        """Task ids of the holders; of a `Lock`, its hostname and process."""
        return [holder.task_id or worker_of(holder) for holder in self.holders]

    @property
    def is_empty(self) -> bool:
        return not (self.holders or self.dropped)

    def as_json(self) -> dict[str, Any]:
        facts = {"key": self.key, "asked": self.asked, "dropped": list(self.dropped)}
        return {**facts, "gone": self.gone, "seconds": round(self.seconds, 3)}


def planned(survey: LockState, name: str | None) -> Break:
    """A break of the holders of that name; without a name, of all of them, and of the marks."""
    holders = [holder for holder in survey.leases if name in (None, holder.task_id, worker_of(holder))]
    states = () if name else {row.state for row in rows_of(survey)}
    return Break(survey.key, holders, [state for state in ("queued", "next", "quiet") if state in states])


def carry_out(locks: Locks, plan: Break, by: str, *, force: bool = False) -> Break:
    """Ask these holders, and no other one that has come since, to end, or free their places; and drop the marks."""
    tokens = [holder.token for holder in plan.holders]
    holders, dropped = locks.store.break_lock(plan.key, tokens, by, marks=bool(plan.dropped), force=force)
    for holder in holders:
        event = "lock.broken key=%s task_id=%s by=%s force=%s"
        logger.info(event, plan.key, holder.task_id, by, force)
    left = [] if force else holders
    return Break(plan.key, holders, dropped, left, gone=not left)


def wait_until_gone(locks: Locks, broken: Break, seconds: float | None) -> Break:
    """Look again and again until the holders that were asked have ended, for so many seconds at most.

    Without a number, it is the time in which they hear of it and end, if their bodies let them.
    """
    if seconds is None:
        seconds = max(holder.expires_in for holder in broken.left) * _UNTIL_A_RENEWAL + _TO_END
    began_at, asked = clock(), {holder.token for holder in broken.left}
    while True:
        left = [holder for holder in locks.survey(broken.key).holders if holder.token in asked]
        waited = clock() - began_at
        if not left or waited >= seconds:
            return replace(broken, gone=not left, seconds=waited, left=left)
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


# For people.


def plan_text(plan: Break, *, force: bool) -> str:
    """The holders and marks of a break, and its risk."""
    lines = []
    if plan.holders:
        lines.append(f"To be {'freed at once' if force else 'asked to end'}: {shown(', '.join(plan.asked))}")
    if plan.holders and force:
        lines.append("A body that is still alive keeps running beside the next one, at least until its next renewal.")
    if plan.dropped:
        lines.append(f"To be dropped: {', '.join(plan.dropped)}")
    return "\n".join(lines)


def outcome_text(broken: Break, app: str, *, force: bool) -> str:
    """The result; *app* is what to give as `-A`."""
    if broken.is_empty:
        return "Nothing was done: the holders and marks that were to be broken are gone."
    if broken.gone and not broken.holders:
        return f"Dropped: {', '.join(broken.dropped)}."
    if broken.gone and force:
        return "Freed. A body that is still alive learns of it at its next renewal, and ends with LockLost."
    if broken.gone:
        return f"Free after {duration(broken.seconds)}."
    ends_in = duration(max(holder.expires_in for holder in broken.left))
    lines = [
        f"Not free after {duration(broken.seconds)}. If the process is dead, its lease ends in {ends_in}.",
        "A body that lets no other thread run, or that is only warned (lock_on_lost='warn'), runs to its end.",
    ]
    if ids := [shown(holder.task_id) for holder in broken.left if holder.task_id]:
        lines.append("To end it with its process:")
        lines += [f"  celery -A {shown(app)} control terminate SIGKILL {task_id}" for task_id in ids]
    else:
        lines.append("The holder is a Lock, not a task: its program has to release it.")
    return "\n".join(lines)
