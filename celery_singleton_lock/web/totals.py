"""How much of each task there is: held, waiting, queued."""

from collections.abc import Iterable
from dataclasses import dataclass

from celery_singleton_lock.operations.inventory import Row
from celery_singleton_lock.stores.base import lock_name_of


@dataclass
class Total:
    """What there is of one task now.

    Attributes:
        name: The task's; of what is no task's the lock's.
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


def totals_of(rows: Iterable[Row]) -> list[Total]:
    """The total of each name, by name."""
    totals: dict[str, Total] = {}
    counted = set()
    for row in rows:
        name = row.task_name or lock_name_of(row.key)
        total = totals.setdefault(name, Total(name))
        if row.state == "held":
            total.held += 1
            total.longest = max(total.longest, row.held or 0.0)
        elif row.state in ("queued", "next"):
            total.queued += 1
        if row.key not in counted:
            # Each row of a lock tells of all who wait for it.
            counted.add(row.key)
            total.waiting += row.waiters
    return sorted(totals.values(), key=lambda total: total.name)
