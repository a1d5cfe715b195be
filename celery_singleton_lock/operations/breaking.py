"""Asking the holders of one lock to end, and waiting until they have."""

import logging
import time
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.operations.inventory import Locks, row_of_holder, rows_of
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
