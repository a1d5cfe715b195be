"""What an operator is shown of the locks in a store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from celery_singleton_lock.stores.records import Holder

MarkState = Literal["queued", "next", "quiet"]


@dataclass(frozen=True, slots=True)
class LeftMark:
    """A mark of a call that holds no lease.

    Attributes:
        state: `queued`, `next` or `quiet`.
        task_id: The call's.
        expires_in: Seconds until the mark means nothing any more.
        task_name: The task's name, if it is known.
        label: What operators read beside the key, if there is a label.
    """

    state: MarkState
    task_id: str
    expires_in: float
    task_name: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class LockState:
    """All that is known of a key.

    Attributes:
        key: The lock key.
        at: When the store answered, by its clock, in microseconds.
        fence: The greatest that was given; None if nothing is known of it any more.
        holders: All of them, cool-downs too; the lease that ends first, first.
        marks: Those in force.
        waiters: How many have a turn; behind the first 200 tickets, some may have left.
        turns: Of those among the first 200 tickets, in their order: the task id, empty for a `Lock`, and the seconds
            until the turn ends, unless it asks again.
        asked_by: Who has asked a holder to end, by its token.
    """

    key: str
    at: int
    fence: int | None
    holders: tuple[Holder, ...]
    marks: tuple[LeftMark, ...]
    waiters: int
    turns: tuple[tuple[str, float], ...] = ()
    asked_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def leases(self) -> list[Holder]:
        """The holders without the cool-downs."""
        return [holder for holder in self.holders if not holder.is_on_hold]


@dataclass(frozen=True, slots=True)
class BreakResult:
    """The effect of a break.

    Attributes:
        holders: Those that were asked to end, or whose places were freed.
        dropped: Which marks were in force and are gone; a cool-down counts as `quiet`.
    """

    holders: tuple[Holder, ...]
    dropped: tuple[MarkState, ...]


@dataclass(frozen=True, slots=True)
class Latency:
    """How a store answers.

    Attributes:
        round_trip: Seconds from a question to its answer, the median of a few.
        ahead: Seconds by which the store's clock is ahead of this machine's.
    """

    round_trip: float
    ahead: float


# How counts are written: one hash for all, with a field for each number.

BOUNDS = (0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0)
"""Upper bounds of the buckets of a histogram, in seconds; one more bucket has the rest."""

OTHERS = "_other"
"""Stands for a task's name if there are too many names."""

KEPT = 30 * 24 * 3600.0
"""Seconds for which counts are kept if nobody adds to them."""


def hash_of(key: str) -> str:
    """The key of the counts that belong to a lock key. It has no braces, so it is no lock key itself."""
    return key.partition("{")[0] + "stats"


def field_of(name: str, label: str, task: str) -> str:
    return f"{name}:{label}:{task}"


def field_parts(field: str) -> tuple[str, str, str]:
    name, _, rest = field.partition(":")
    label, _, task = rest.partition(":")
    return name, label, task
