"""Requests to a store of locks, and its answers. Durations are seconds; moments are microseconds since the epoch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Literal
from urllib.parse import unquote

from celery_singleton_lock.errors import HolderState, LostReason

Succession = Literal["rerun", "replace"]
Outcome = Literal["ended", "stored", "retried"]
PublishMode = Literal["", "anyway", "over"]
"""Of a call that is sent whatever is found: no cool-down keeps its mark off, and with `over` no other mark, either."""


Newest = Literal["", "queued", "next"]
"""How a call has come to be the newest, so that older calls may have ended in its favour; empty if it is not.

    ""        published, in a queue mode with `rerun` or `replace`       "queued"
    ""        refused, and the store names it as the call that runs next "next"
    "queued"  its message goes back to the broker                        "next"

It is noted on the message. The note is gone once the body begins, and ends with the message.
"""


@dataclass(slots=True)
class Facts:
    """The facts about a claimant that others may know."""

    task_id: str = ""  # empty if it is no task
    task_name: str = ""  # if it is not the name of the lock
    hostname: str = ""
    pid: int = 0
    attempt: int = 0
    published: int = 0  # when its call was published first; 0 if that is not known
    label: str = ""
    keeps_result: bool = True  # under its task id, where others can read it


WHOLE = "*"
"""Begins the token of a claim on the whole lock: granted while nobody holds a place, and then nobody else gets one."""


@dataclass(slots=True)
class Claim:
    """One execution's wish to hold a lock."""

    key: str
    token: str  # fresh for each execution; see `WHOLE`
    ttl: float
    limit: int = 1  # granted while fewer places are held, so never with 0
    facts: Facts = field(default_factory=Facts)
    min_hold: float = 0.0  # how long a released place stays taken, counted from its grant
    message: int = 0  # its publication, which distinguishes the messages of one task id
    may_be_copy: bool = False  # so the store first looks for a run of this message
    heeds_queued: bool = False  # a free place belongs to the call that is queued
    succeeds: Succession | None = None  # becomes the successor if it is refused
    supersedes_for: float = 0.0  # for how long older calls then end in its favour
    newest: Newest = ""
    queued_for: float = 0.0  # for how long it still counts as queued if it is refused
    turn_for: float = 0.0  # for how long it has a turn if it is refused
    waits_here: bool = False  # in this process, which listens; otherwise its message has the turn
    rank: int = 0  # of its turn: the moment of its first refusal, as the store counts it; 0 if it has none
    refused_at: int = 0  # when its call was refused first, by this execution or an earlier one; 0 if it never was
    patience: float = float("inf")  # for how long it may ask at most, all tries together

    @property
    def marker(self) -> str:
        return marker_of(self.facts.task_id, self.message)

    @property
    def channel(self) -> str:
        """Where its turn is called."""
        return f"{self.key}:{self.token if self.waits_here else f'@{self.facts.task_id}'}"


def lock_name_of(key: str) -> str:
    """The lock name inside *key*, without prefix and digest."""
    return unquote(key.partition("{")[2].rpartition(":")[0])


def marker_of(task_id: str, message: int) -> str:
    """The field that says that a run of a message has ended; a task id alone may be used again."""
    return f"done:{task_id}:{message}"


@dataclass(slots=True)
class Grant:
    """The claim was granted."""

    place: int  # from 1
    fence: int
    since: float  # when it was granted, by the server's clock, in seconds since the epoch
    sent_at: float  # `clock()` before the request; the ttl counts from here
    took_over: bool = False
    died: Facts | None = None  # of the holder that had the place, and died in it


@dataclass(frozen=True, slots=True)
class Done:
    """A run of this very message has ended, so the claim is that of a copy."""

    attempt: int
    outcome: Outcome  # `stored` once its result is stored, `ended` until then; `retried` if another attempt follows


Marker = Literal["none", "left", "unknown"]
"""Whether the store has a marker; it is unknown if it gave no answer."""


@dataclass(slots=True)
class Ending:
    """The end of a run, recorded at its release, for later deliveries of its message."""

    outcome: Outcome
    kept: float  # for how long the broker may deliver the message again
    is_due: bool  # later deliveries are likely, although none has come yet
    marker: Marker = "unknown"  # in which the store keeps it


@dataclass(frozen=True, slots=True)
class Slot:
    """One moment at which a beat has to send an entry."""

    entry: str
    due: int
    fence: int  # of the lease under which it is claimed
    sent: int = 0  # when the entry was last sent, or began; 0 for never, -1 to forget the entry


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of a lock, as it described itself when it took it.

    Attributes:
        key: The lock key.
        token: Who has it can release the lock, so it is in no log.
        fence: A number greater than that of any earlier holder.
        acquired_at: When it was granted, by the store's clock.
        expires_in: Seconds for which its lease lasts unless it is renewed.
        task_id: Of its call; None if it is no task.
        attempt: How many retries came before.
        published: When its call was published first, in microseconds.
        label: What its `lock_label` shows of the call.
        ttl: Seconds for which a renewal keeps it; 0 if that is not known.
        keeps_result: Others can read its result under its task id, unless its task keeps none. A run in eager mode, for
            example, hands its result to its caller alone.
        call_ended: Its call has ended, although its run may go on. The next call may be published.
    """

    key: str
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
    ttl: float = 0.0
    keeps_result: bool = True
    call_ended: bool = False

    @classmethod
    def former(cls, key: str, task_id: str | None, attempt: int = 0) -> "Holder":
        """A former holder, of which only the task id is known."""
        return cls(key, "", 0, datetime.now(UTC), 0.0, task_id, attempt=attempt)

    @property
    def is_on_hold(self) -> bool:
        """The run has ended, and its `min_hold` still keeps the place."""
        return self.token.startswith("~")

    @property
    def is_unrenewed(self) -> bool:
        """More than half of its ttl is gone. A renewal that is due each third has not come."""
        return bool(self.fence) and not self.is_on_hold and self.expires_in < self.ttl / 2

    @property
    def state(self) -> HolderState:
        """`held`; `cooldown`; `queued` if it goes before, and holds nothing yet; or `ended`."""
        if self.fence or self.is_on_hold:
            return "cooldown" if self.is_on_hold else "held"
        return "queued" if self.expires_in > 0 else "ended"

    @property
    def age(self) -> float:
        """Seconds since it was acquired, by this machine's wall clock."""
        return max(0.0, (datetime.now(UTC) - self.acquired_at).total_seconds())


@dataclass(frozen=True, slots=True)
class Conflict:
    """Every place is held, or belongs to a call that goes before."""

    key: str
    holders: tuple[Holder, ...]  # a few, the lease that ends first before the others; or else those that go before
    successor: str | None = None  # task id of the call that runs next, for a claim that `succeeds`; it may be its own
    at: int = 0  # when the store answered, by its clock
    is_own: bool = False  # the holder is another delivery of the same message
    rank: int = 0  # of its turn, for a claim with `turn_for`; 0 if it has none
    ahead: int = 0  # how many turns are before it; 0 if the first was called, and may not come
    free_in: float = float("inf")  # seconds until a place is free, if nobody renews

    @property
    def first(self) -> Holder:
        """The holder whose lease ends first if nobody renews."""
        return self.holders[0]


Verdict = Grant | Conflict | Done
"""What the store says to a claim."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a message in the line for a lock."""

    at: int  # when the store answered, by its clock
    comes: bool  # now, to take its turn, or because it has none any more
    ahead: int  # how many turns are before it; 0 if the first was called, and may not come
    free_in: float  # if nobody renews


class Renewal(IntEnum):
    """What the store says to a renewal, by the number that renew.lua has for it."""

    RENEWED = 1
    REPLACED = 2  # renewed; its holder has to make way for a successor
    BROKEN = 4  # renewed; a person has asked its holder to stop
    TAKEN = 0  # lost: somebody else has its place
    GONE = -1  # lost: nobody has it


# A table, because `Renewal(number)` costs several calls.
RENEWALS = {int(each): each for each in Renewal}


@dataclass(frozen=True, slots=True)
class Release:
    """What has become of a lease, or of a turn, that was given back.

    Attributes:
        marker: Whether the ending of the run is kept for later deliveries. If that is unknown, a release that is tried
            again in the background has the last word.
        lost: Why the lease had been lost before; None if nothing says so.
    """

    marker: Marker
    lost: LostReason | None = None


RELEASED = Release("none")
UNANSWERED = Release("unknown")
# By the number that release.lua has for it.
RELEASES = {
    1: RELEASED,
    3: Release("left"),
    0: Release("none", "taken"),
    2: Release("left", "taken"),
    4: Release("none", "expired"),
    6: Release("left", "expired"),
}


# What an operator sees.


@dataclass(frozen=True, slots=True)
class LeftMark:
    """What a call that holds no lease has in the store: a mark, or a turn.

    Attributes:
        state: `queued`, `next` or `cooldown`; of a turn, `waiting`; of a key that cannot be read, `unreadable`.
        task_id: The call's; empty for a `Lock` that waits.
        expires_in: Seconds until it means nothing any more.
        task_name: The task's name, if it is known.
        label: What operators read beside the key, if there is a label.
        due_for: For how many seconds a queued call is due until its mark ends; 0 if that is `lock_queue_ttl`.
        queue: The queue to which a queued call was published, if its publisher knew that before.
        token: Of a turn.
        is_unheard: Nobody listened for the turn when it was called, so others are called in its place.
        refused_at: When the call of a turn was refused first, in microseconds; 0 of a mark.
    """

    state: Literal["queued", "next", "cooldown", "waiting", "unreadable"]
    task_id: str
    expires_in: float
    task_name: str | None = None
    label: str | None = None
    due_for: float = 0.0
    queue: str | None = None
    token: str = field(default="", repr=False)
    is_unheard: bool = False
    refused_at: int = 0


@dataclass(frozen=True, slots=True)
class LockState:
    """All that is known of a key.

    Attributes:
        key: The lock key.
        at: When the store answered, by its clock, in microseconds.
        fence: The greatest that was given; None if nothing is known of it any more.
        places: Who has one: holders and cool-downs; the one that ends first, first.
        marks: Those in force.
        waiters: How many have a turn; behind the first 200 tickets, some may have left.
        turns: Of those among the first 200 tickets, in their order.
        asked_by: Who has asked a holder to end, by its token.
        holders: Who holds the lock.
        queued: Task id of the call that is queued; None if there is none.
        next: The same of the call that runs next.
        waiting: How many wait for it.
        cooldown_until: When its last cool-down ends; None if there is none.
        problem: Why nothing else is known: the key is another program's, or damaged.
    """

    key: str
    at: int = 0
    fence: int | None = None
    places: tuple[Holder, ...] = ()
    marks: tuple[LeftMark, ...] = ()
    waiters: int = 0
    turns: tuple[LeftMark, ...] = ()
    asked_by: Mapping[str, str] = field(default_factory=dict, repr=False)
    problem: str | None = None

    @property
    def holders(self) -> list[Holder]:
        return [holder for holder in self.places if not holder.is_on_hold]

    @property
    def queued(self) -> str | None:
        return self._marked("queued")

    @property
    def next(self) -> str | None:
        return self._marked("next")

    @property
    def waiting(self) -> int:
        return self.waiters

    @property
    def cooldown_until(self) -> datetime | None:
        ends_in = [place.expires_in for place in self.places if place.is_on_hold]
        ends_in += [mark.expires_in for mark in self.marks if mark.state == "cooldown"]
        return datetime.fromtimestamp(self.at / 1_000_000 + max(ends_in), UTC) if ends_in else None

    def _marked(self, state: str) -> str | None:
        return next((mark.task_id for mark in self.marks if mark.state == state), None)
