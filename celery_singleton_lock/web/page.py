"""What the page of the locks shows, under Flask and in Django's admin."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.operations.rows import OF_ONE_PROCESS, Locks, Row, a_few, duration
from celery_singleton_lock.options import as_set
from celery_singleton_lock.stores.clock import clock

# After a look at all locks nobody looks again for so many times its duration, so that requests cost the store at most
# a twentieth of its time.
_REST = 20
_MOST_ROWS = 200
_MOST_WAITERS = 10


class SnapshotCache:
    """Looks at all locks of an app, not more often than its store can bear.

    Each raises `ConfigurationError` if the app has no store that can be used, and `StoreError` if that does not answer.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._looking = threading.Lock()
        self._kept = list[Row](), 0.0
        self._kept_until = 0.0

    def look(self) -> tuple[list[Row], float]:
        """All locks, as they are or were a moment ago, and how long it took to look."""
        with self._looking:
            if clock() >= self._kept_until:
                began_at = clock()
                rows = Locks(self.app).rows()
                self._kept = rows, clock() - began_at
                self._kept_until = clock() + _REST * self._kept[1]
            return self._kept

    def matching(self, pattern: str) -> list[Row]:
        """The rows whose lock name matches a glob, or contains a text that is no glob."""
        glob = pattern if set("*?[") & set(pattern) else f"*{pattern}*"
        return [row for row in self.look()[0] if fnmatchcase(row.name, glob)]

    def forget(self) -> None:
        """Look again at the next request."""
        self._kept_until = 0.0


@dataclass
class Total:
    """The present numbers of some locks."""

    held: int = 0
    waiting: int = 0
    queued: int = 0
    longest: float = 0.0
    queued_for: float = 0.0


def totals_of(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, Total]:
    """The totals, by name; the lease of a beat is that of no run."""
    totals = defaultdict[str, Total](Total)
    counted = set()
    for row in (row for row in rows if not row.is_beat):
        total = totals[name_of(row)]
        if row.state == "held":
            total.held += 1
            total.longest = max(total.longest, row.age or 0.0)
        elif row.state in ("queued", "next"):
            total.queued += 1
            total.queued_for = max(total.queued_for, row.queued_for or 0.0)
        if row.lock.key not in counted:
            # Each row of a lock has the number of all its waiters.
            counted.add(row.lock.key)
            total.waiting += row.lock.waiters
    return totals


def page_context(snapshots: SnapshotCache, pattern: str) -> dict[str, Any]:
    """All that a template of the page needs, to be escaped there; with a `problem` if nothing can be shown."""
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    facts: dict[str, Any] = {"name": snapshots.app.main or "this app", "pattern": pattern, "now": now}
    try:
        rows = snapshots.matching(pattern)
        locks = Locks(snapshots.app)
    except (StoreError, ConfigurationError) as error:
        return facts | {"address": getattr(error, "store", "no store"), "problem": as_set(snapshots.app, str(error))}
    total = totals_of(rows, lambda _: "").get("", Total())
    return facts | {
        "address": locks.store.address,
        "alone": OF_ONE_PROCESS if locks.is_of_one_process else None,
        "sums": {
            "Held": total.held,
            "Waiting": total.waiting,
            "Queued": total.queued,
            "Longest held": duration(total.longest or None),
        },
        "lines": list(_lines(rows)),
        "more": max(0, len(rows) - _MOST_ROWS),
    }


def _lines(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    named = set[str]()
    for row in rows[:_MOST_ROWS]:
        # A lock may have several rows, and it is its first that names those who wait.
        turns = () if row.lock.key in named else row.lock.turns
        named.add(row.lock.key)
        yield {
            "row": row,
            "since": duration(row.age),
            "left": duration(row.left),
            "waiting": a_few([each.task_id or "a Lock" for each in turns], row.lock.waiters, most=_MOST_WAITERS)
            if turns
            else "",
        }
