"""The numbers of each task: held, waiting, queued."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from celery_singleton_lock.operations.inventory import Row
from celery_singleton_lock.stores.base import lock_name_of


@dataclass
class Total:
    """The present numbers of one task.

    Attributes:
        name: The task's name; the lock's if there is no task.
        held: How many hold a lock.
        waiting: How many wait in the pool, or as a `Lock`.
        queued: How many calls are queued, or are next.
        longest: For how many seconds the oldest holder has held.
    """

    name: str
    held: int = 0
    waiting: int = 0
    queued: int = 0
    longest: float = 0.0


def name_in(row: Row) -> str:
    """The owner of a row, as a person reads it."""
    return row.task_name or lock_name_of(row.key)


def totals_of(rows: Iterable[Row], name_of: Callable[[Row], str] = name_in) -> list[Total]:
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
        if row.key not in counted:
            # Each row of a lock has the number of all its waiters.
            counted.add(row.key)
            total.waiting += row.waiters
    return sorted(totals.values(), key=lambda total: total.name)
