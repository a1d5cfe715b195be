"""Requests to a store of locks, and its answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Literal

Succession = Literal["rerun", "replace"]
Outcome = Literal["ended", "stored", "retried"]
PublishMode = Literal["", "anyway", "over"]
"""Of a call that is sent whatever is found: no cool-down keeps its mark off, and with `over` no other mark, either."""


@dataclass(slots=True)
class Facts:
    """The facts about a claimant that others may know.

    Attributes:
        task_id: Its task id; empty if it is no task.
        task_name: The task's name, if it is not the name of the lock.
        hostname: Of the worker, or of the machine.
        pid: Its process.
        attempt: How many times its call was retried before.
        published: When its call was published first, in microseconds since the epoch; 0 if that is not known.
        label: What operators read beside the key, or an empty text.
    """

    task_id: str = ""
    task_name: str = ""
    hostname: str = ""
    pid: int = 0
    attempt: int = 0
    published: int = 0
    label: str = ""


@dataclass(slots=True)
class Claim:
    """One execution's wish to hold a lock.

    Attributes:
        key: The lock key.
        token: Proof of this claim, fresh for each execution.
        ttl: Seconds the lease lasts without renewal.
        limit: How many may hold the lock at once, for this claim.
        facts: What others may know about the claimant.
        min_hold: Seconds for which a released place stays taken, counted from its grant.
        message: What distinguishes this message from others of its task id: the time of its publication.
        may_be_copy: This may be a later delivery of a message, so the store looks for its run first.
        heeds_queued: A free place belongs to the call that is queued.
        succeeds: By which rule it becomes the successor if it is refused, if it does.
        supersedes_for: Seconds for which older calls end in its favour if it becomes the successor in their place.
        asked: It has asked to be the successor before.
        queued_for: Seconds for which it goes on to count as queued if it is refused; 0 if it has left no mark.
        patience: Seconds for which it may ask at most, all tries together.
    """

    key: str
    token: str
    ttl: float
    limit: int = 1
    facts: Facts = field(default_factory=Facts)
    min_hold: float = 0.0
    message: int = 0
    may_be_copy: bool = False
    heeds_queued: bool = False
    succeeds: Succession | None = None
    supersedes_for: float = 0.0
    asked: bool = False
    queued_for: float = 0.0
    patience: float = float("inf")

    @property
    def marker(self) -> str:
        return marker_of(self.facts.task_id, self.message)


def marker_of(task_id: str, message: int) -> str:
    """The name of a message among those of which a run has ended; a task id alone may be used again."""
    return f"done:{task_id}:{message}"


@dataclass(slots=True)
class Grant:
    """The claim was granted.

    Attributes:
        place: Which of the lock's places it has, from 1.
        fence: A number greater than that of any earlier grant of the key.
        took_over: The place was left by a holder that never released it.
        since: When it was granted, by the server's clock, in seconds since the epoch.
        sent_at: `clock()` before the request that was answered; the ttl counts from here.
    """

    place: int
    fence: int
    took_over: bool
    since: float
    sent_at: float


@dataclass(frozen=True, slots=True)
class Done:
    """A run of this very message has ended, so the claim is that of a copy.

    Attributes:
        attempt: Which attempt it was.
        outcome: `stored` once its result is stored, `ended` until then; `retried` if another attempt follows.
    """

    attempt: int
    outcome: Outcome


@dataclass(slots=True)
class Ending:
    """The end of a run, recorded at its release, for later deliveries of its message.

    Attributes:
        outcome: `ended`, or `retried` if another attempt follows.
        kept: Seconds for which the broker may deliver the message again.
        is_due: Later deliveries are likely, although none has come yet.
    """

    outcome: Outcome
    kept: float
    is_due: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """One moment at which a beat has to send an entry.

    Attributes:
        entry: The entry's name.
        due: The moment, in microseconds since the epoch.
        fence: Of the lease under which it is claimed.
        sent: When the entry was last sent, in microseconds since the epoch; 0 for never.
    """

    entry: str
    due: int
    fence: int
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of a lock, as it described itself when it took it."""

    key: str
    # Its owner can release the lock with it, so it is in no log.
    token: str = field(repr=False)
    fence: int
    acquired_at: datetime
    expires_in: float
    task_id: str | None = None
    task_name: str | None = None
    hostname: str | None = None
    pid: int | None = None
    attempt: int = 0
    published: int = 0
    label: str | None = None

    @classmethod
    def former(cls, key: str, task_id: str | None, attempt: int = 0) -> "Holder":
        """A former holder, of which only the task id is known."""
        return cls(key, "", 0, datetime.now(UTC), 0.0, task_id, attempt=attempt)

    @property
    def is_on_hold(self) -> bool:
        """The run has ended, and its `min_hold` still keeps the place."""
        return self.token.startswith("~")

    @property
    def age(self) -> float:
        """Seconds since it was acquired, by this machine's wall clock."""
        return max(0.0, (datetime.now(UTC) - self.acquired_at).total_seconds())


@dataclass(frozen=True, slots=True)
class Conflict:
    """Every place is held, or belongs to a call that goes before.

    Attributes:
        key: The lock key.
        holders: A few of those whose deadline lies ahead; the lease that ends first, first.
            If nobody holds it, those that go before.
        successor: For a claim that `succeeds`: task id of the call that runs next, which is this one or has superseded
            it; None while neither is known.
        at: When the store answered, by its clock, in microseconds.
        is_own: The holder is another delivery of the same message.
    """

    key: str
    holders: tuple[Holder, ...]
    successor: str | None = None
    at: int = 0
    is_own: bool = False

    @property
    def first(self) -> Holder:
        """The holder whose lease ends first if nobody renews."""
        return self.holders[0]


class Answer(IntEnum):
    BROKEN = 4
    MARKED = 3
    REPLACED = 2
    DONE = 1
    TAKEN = 0
    GONE = -1


# What an operator sees.


@dataclass(frozen=True, slots=True)
class LeftMark:
    """What a call that holds no lease has in the store: a mark, or a turn.

    Attributes:
        state: `queued`, `next` or `quiet`; of a turn, `waiting`.
        task_id: The call's; empty for a `Lock` that waits.
        expires_in: Seconds until it means nothing any more.
        task_name: The task's name, if it is known.
        label: What operators read beside the key, if there is a label.
    """

    state: Literal["queued", "next", "quiet", "waiting"]
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
        turns: Of those among the first 200 tickets, in their order.
        asked_by: Who has asked a holder to end, by its token.
    """

    key: str
    at: int = 0
    fence: int | None = None
    holders: tuple[Holder, ...] = ()
    marks: tuple[LeftMark, ...] = ()
    waiters: int = 0
    turns: tuple[LeftMark, ...] = ()
    asked_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def leases(self) -> list[Holder]:
        """The holders without the cool-downs."""
        return [holder for holder in self.holders if not holder.is_on_hold]
