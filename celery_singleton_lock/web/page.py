"""What the page of the locks shows, and what its buttons do: the same under Flask as in Django's admin."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.breaking import ask, preview
from celery_singleton_lock.operations.inventory import (
    OF_ONE_PROCESS,
    Locks,
    Row,
    a_few,
    duration,
    is_of_one_process,
    shown,
)
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import clock

# After a look at all locks nobody looks again for so many times its duration, so that requests cost the store at most
# a twentieth of its time.
_REST = 20
_REST_AFTER_A_FAILURE = 1.0
_MOST_ROWS = 200
_MOST_WAITERS = 10
_LONGEST_NAME = 200

RESULTS = {
    "asked": "Asked to stop. The holder learns of it at its next renewal, within a third of its TTL.",
    "dropped": "The marks are gone.",
    "nothing": "Nothing was done: nobody was there any more.",
    "changed": "Nothing was done: somebody holds the lock now. Check again.",
    "beat": "Nothing was done: this is the leadership of a beat, which has no run to stop.",
}
"""The results of `break_by_button`, for people."""
DONE = ("asked", "dropped")


class Looks:
    """Looks at all locks of an app, not more often than its store can bear.

    Arguments:
        app: The app.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._looking = threading.Lock()
        self._kept: tuple[list[Row], float] | StoreError | None = None
        self._kept_until = 0.0

    def look(self) -> tuple[list[Row], float]:
        """All locks, as they are or were a moment ago, and how long it took to look.

        Raises:
            ConfigurationError: The app has no store that can be used.
            StoreError: No answer in time.
        """
        with self._looking:
            if self._kept is None or clock() >= self._kept_until:
                began_at = clock()
                try:
                    self._kept = Locks(self.app).rows(), clock() - began_at
                except StoreError as error:
                    self._kept = error
                failed = isinstance(self._kept, StoreError)
                self._kept_until = clock() + (_REST_AFTER_A_FAILURE if failed else _REST * (clock() - began_at))
            if isinstance(self._kept, StoreError):
                raise type(self._kept)(*self._kept.args)
            return self._kept

    def matching(self, pattern: str) -> list[Row]:
        """The rows whose lock name matches a glob, or contains a text that is no glob.

        Raises:
            ConfigurationError: The app has no store that can be used.
            StoreError: No answer in time.
        """
        pattern = pattern[:_LONGEST_NAME]
        glob = pattern if set("*?[") & set(pattern) else f"*{pattern}*"
        return [row for row in self.look()[0] if fnmatchcase(row.name, glob)]

    def break_by_button(self, key: str, holder: str | None, user: object, address: str | None) -> str:
        """Ask one holder to end; or, without a name, drop the marks of a lock that nobody holds.

        Arguments:
            key: The lock key, as a visitor has sent it.
            holder: The holder's task id, or hostname and process.
            user: Who asks, for the log and the result of the run.
            address: The machine of the one who asks.

        Raises:
            ConfigurationError: It is no lock key of this app.
            StoreError: No answer in time. It may be done all the same.
        """
        locks = Locks(self.app)
        survey = locks.survey(locks.checked_key(key))
        if any(each.task_name == "celery.beat" for each in survey.holders):
            return "beat"
        if not holder and survey.leases:
            return "changed"
        if not preview(survey, holder or None).was_there:
            return "nothing"
        by = f"{shown(str(user))[:100]}@{address or 'unknown'}"
        broken = ask(locks, survey, holder or None, by, force=False)
        # Look again at the next request.
        self._kept_until = 0.0
        return "asked" if broken.asked else "dropped" if broken.dropped else "nothing"


@dataclass
class Total:
    """The present numbers of one task; without a task, of a lock's name."""

    name: str
    held: int = 0
    waiting: int = 0
    queued: int = 0
    longest: float = 0.0
    queued_for: float = 0.0


def totals_of(
    rows: Iterable[Row], name_of: Callable[[Row], str] = lambda row: row.task_name or row.name
) -> list[Total]:
    """The totals, by name."""
    totals: dict[str, Total] = {}
    counted = set()
    for row in rows:
        total = totals.setdefault(name_of(row), Total(name_of(row)))
        if row.state == "held":
            total.held += 1
            total.longest = max(total.longest, row.held or 0.0)
        elif row.state in ("queued", "next"):
            total.queued += 1
            total.queued_for = max(total.queued_for, row.queued_for or 0.0)
        if row.key not in counted:
            # Each row of a lock has the number of all its waiters.
            counted.add(row.key)
            total.waiting += row.waiters
    return sorted(totals.values(), key=lambda total: total.name)


def contents(looks: Looks, pattern: str) -> dict[str, Any]:
    """All that a template of the page needs, in texts that are to be escaped; with a `problem` if nothing can be shown.

    Arguments:
        looks: The looks at the locks.
        pattern: A glob for lock names, or a part of them; all locks if it is empty.
    """
    facts: dict[str, Any] = {
        "name": shown(looks.app.main or "this app"),
        "pattern": pattern[:_LONGEST_NAME],
        "now": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
    }
    try:
        rows, store = looks.matching(pattern), store_of(looks.app)
    except (StoreError, ConfigurationError) as error:
        address = error.store if isinstance(error, StoreError) else "no store"
        return {**facts, "address": shown(address), "problem": shown(str(error))}
    totals = totals_of(rows)
    return {
        **facts,
        "address": shown(store.address),
        "alone": OF_ONE_PROCESS if is_of_one_process(store) else None,
        "sums": {
            "Held": sum(total.held for total in totals),
            "Waiting": sum(total.waiting for total in totals),
            "Queued": sum(total.queued for total in totals),
            "Longest held": _time(max((total.longest for total in totals), default=0.0) or None),
        },
        "lines": list(_lines(rows)),
        "more": max(0, len(rows) - _MOST_ROWS),
        "totals": [
            (shown(total.name), total.held, total.waiting, total.queued, _time(total.longest or None))
            for total in totals
        ],
    }


def _lines(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    held, named = {row.key for row in rows if row.state == "held"}, set[str]()
    for row in rows[:_MOST_ROWS]:
        # A lock may have several rows, and it is its first that names those who wait.
        waiting = () if row.key in named else [shown(task_id) or "a Lock" for task_id in row.waiting]
        named.add(row.key)
        yield {
            "name": shown(row.name),
            "label": shown(row.label or ""),
            "key": row.key,
            "shown_key": shown(row.key),
            "state": row.state,
            "is_beat": row.is_beat,
            "asked_by": shown(row.asked_by or ""),
            "task_id": shown(row.task_id or "-"),
            "worker": shown(row.worker or "-"),
            "since": _time(row.queued_for if row.held is None else row.held),
            "left": duration(row.expires_in),
            "waiters": row.waiters,
            "waiting": a_few(waiting, row.waiters, most=_MOST_WAITERS) if waiting else "",
            "button": _button(row, is_held=row.key in held),
        }


def _button(row: Row, *, is_held: bool) -> dict[str, str] | None:
    if row.state == "held" and not row.is_beat and not row.asked_by:
        effect = (
            "LockLost is raised in its body at the next renewal, and the run ends as REVOKED. It keeps the lock until "
            "then."
        )
        return {"text": "Ask to stop", "holder": row.task_id or row.worker, "effect": effect}
    if not is_held:
        effect = (
            "An equal call can be published again at once. If the marked call is still in the broker, it runs as well, "
            "before or after the other."
        )
        return {"text": "Drop marks", "holder": "", "effect": effect}
    return None


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
