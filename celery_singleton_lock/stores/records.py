"""Requests to a store, and its answers. Durations are seconds; moments are microseconds since the epoch."""

import os
from binascii import b2a_base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Literal
from urllib.parse import unquote

from celery_singleton_lock.errors import LockHeld, LockHeldState, LostReason

ACQUIRE_BOUND = 5.0  # seconds that the request for a claim takes at most, whatever the store does

Succession = Literal["rerun", "replace"]
Outcome = Literal["ended", "stored", "retried"]
PublishMode = Literal["", "anyway", "over"]  # `anyway` despite a cool-down; `over` despite a queued call, too
# The newest call is `queued` once marked, `next` once requeued. It must run, because older calls may have ended for it.
Newest = Literal["", "queued", "next"]


@dataclass(slots=True, kw_only=True)
class Facts:
    """The facts of a call that its claim and the history have in common."""

    task_id: str = ""  # empty if it is no task
    task_name: str = ""  # empty if it is the name of the lock
    hostname: str = ""
    pid: int = 0
    attempt: int = 0
    published: int = 0  # when its call was published first; 0 if unknown
    label: str = ""
    keeps_result: bool = True  # others can read its result under its task id


WHOLE = "*"  # A token that begins with it claims the whole lock: granted if no place is taken, and keeps others out.
_SAFE_IN_URLS = bytes.maketrans(b"+/", b"-_")


def new_token() -> str:
    # No batch is read ahead: a forked process, or a restored snapshot, would use the same tokens again.
    return b2a_base64(os.urandom(12), newline=False).translate(_SAFE_IN_URLS).decode()


@dataclass(slots=True)
class Claim(Facts):
    key: str
    token: str  # fresh for each execution; see `WHOLE`
    ttl: float
    limit: int = 1  # places of the lock; with 0 nothing is granted
    min_hold: float = 0.0  # the cool-down in seconds, counted from the grant
    message: int = 0  # tells messages of one task id apart: when this one was published; 0 if unknown
    may_be_copy: bool = False  # the store first looks for another run of this message
    heeds_queued: bool = False  # a free place is left to a queued call
    succeeds: Succession | None = None  # if refused, the call becomes the successor
    supersedes_for: float = 0.0  # seconds for which older calls end in favour of this one
    newest: Newest = ""
    queued_for: float = 0.0  # seconds for which the call still counts as queued if it is refused
    turn_for: float = 0.0  # seconds for which the call has a turn if it is refused
    waits_here: bool = False  # the turn belongs to this process; if False, to the message
    rank: int = 0  # when the call got its turn; 0 for a newcomer
    refused_at: int = 0  # when the call was first refused, in this execution or an earlier one; 0 if never
    patience: float = ACQUIRE_BOUND  # seconds for the request, all tries together

    @property
    def marker(self) -> str:
        return marker_of(self.task_id, self.message)

    @property
    def channel(self) -> str:
        return f"{self.key}:{self.token if self.waits_here else f'@{self.task_id}'}"


def lock_name_of(key: str) -> str:
    return unquote(key.partition("{")[2].rpartition(":")[0])


def marker_of(task_id: str, message: int) -> str:
    return f"done:{task_id}:{message}"


@dataclass(slots=True)
class Marked:
    sooner: float = 0.0  # seconds to subtract from the call's countdown


@dataclass(slots=True)
class Grant:
    place: int  # from 1
    fence: int
    since: float  # the moment of the grant by the server's clock, in seconds since the epoch
    sent_at: float  # `clock()` before the request, from which the ttl counts
    took_over: bool = False
    died: Facts | None = None  # of the holder that died in this place


@dataclass(frozen=True, slots=True)
class Done:
    """A run of this message has ended, so the claim belongs to a copy."""

    attempt: int
    outcome: Outcome  # `retried` if another attempt follows; `ended` until the result is stored, then `stored`


Marker = Literal["none", "left", "unknown"]  # whether the store has a marker; `unknown` without an answer


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run, for later deliveries of its message."""

    outcome: Outcome
    kept: float  # seconds for which the broker may deliver the message again
    is_due: bool  # another delivery is likely, even if none has come yet


SlotVerb = Literal["claim", "note", "forget"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One moment at which a beat has to send an entry."""

    entry: str
    due: int
    fence: int  # of the beat's lease
    sent: int = 0  # when the entry was last sent, or a new entry's `last_run_at`; 0 if never


class HolderState(StrEnum):
    HELD = "held"  # a lease
    ASKED_TO_STOP = "asked to stop"  # a lease
    COOLDOWN = "cooldown"  # a cool-down after its run, or after its publishing
    QUEUED = "queued"  # the mark of the call that is unique in the queue
    NEXT = "next"  # the mark of the successor
    WAITING = "waiting"  # a turn
    ENDED = "ended"  # no known lease: a run that has just ended, or a newer call that has begun
    UNREADABLE = "unreadable"  # no lock: the key is another program's, or damaged


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of a lock, or a call that goes before others.

    Attributes:
        key: The lock key.
        token: The right to release the lock, so no log shows it.
        state: `held`, `asked to stop`, `cooldown` or `ended`; a call that goes before is `queued`, `next` or `waiting`.
        acquired_at: The moment of the grant by the store's clock. Without a grant, the moment of the answer.
        expires_in: Seconds until its lease, mark or turn ends, unless it is renewed.
        fence: A number greater than that of any earlier holder. 0 without a grant.
        task_id: None for a `Lock`.
        attempt: How many retries came before.
        published: When its call was published first, in microseconds.
        label: The text of its `lock_label`.
        ttl: Seconds for which a renewal keeps it. 0 if unknown.
        queue: The queue to which a queued call was published, if its publisher knew it.
    """

    key: str
    token: str = field(repr=False)
    state: HolderState
    acquired_at: datetime
    expires_in: float
    fence: int = 0
    task_id: str | None = None
    task_name: str | None = None
    hostname: str | None = None
    pid: int | None = None
    attempt: int = 0
    published: int = 0
    label: str | None = None
    ttl: float = 0.0
    keeps_result: bool = True  # others can read it under the task id
    call_ended: bool = False  # the next call may be published, although the run may go on
    due_for: float = 0.0  # seconds from the due time to the end of the mark; 0: the mark ends by `lock_queue_ttl`
    queue: str | None = None
    is_unheard: bool = False  # nobody listened when the turn was woken, so others are woken instead
    refused_at: int = 0  # when the call of the turn was first refused

    @classmethod
    def former(cls, key: str, task_id: str | None, attempt: int = 0) -> "Holder":
        return cls(key, "", HolderState.ENDED, datetime.now(UTC), 0.0, task_id=task_id, attempt=attempt)

    @property
    def has_lease(self) -> bool:
        return self.state in (HolderState.HELD, HolderState.ASKED_TO_STOP)

    @property
    def is_queued_or_next(self) -> bool:
        return self.state in (HolderState.QUEUED, HolderState.NEXT)

    @property
    def goes_before(self) -> bool:
        """Its call holds nothing yet, and runs before a newcomer."""
        return self.is_queued_or_next or self.state is HolderState.WAITING

    @property
    def is_unrenewed(self) -> bool:
        """More than half of its ttl is over, although a renewal is due each third."""
        return self.has_lease and self.expires_in < self.ttl / 2

    @property
    def refusal(self) -> LockHeld:
        return LockHeld(self.key, self.task_id, self.expires_in, self.state_in_log)

    @property
    def state_in_log(self) -> LockHeldState:
        if self.has_lease:
            return "held"
        if self.goes_before:
            return "queued"
        return "cooldown" if self.state is HolderState.COOLDOWN else "ended"

    @property
    def age(self) -> float:
        """Seconds since it was acquired, by this machine's wall clock."""
        return max(0.0, (datetime.now(UTC) - self.acquired_at).total_seconds())


@dataclass(frozen=True, slots=True)
class Conflict:
    """Every place is held, or kept for a call that goes before the caller."""

    key: str
    holders: tuple[Holder, ...]  # a few holders, sorted by deadline; or calls that go before the caller
    successor: str | None = None  # task id of the call that runs next, perhaps the claim's own, if the claim `succeeds`
    at: int = 0  # when the store answered, by its clock
    is_own: bool = False  # the holder is another delivery of the same message
    rank: int = 0  # of its turn, for a claim with `turn_for`; 0 without a turn
    is_near: bool = True  # its turn looks again in a few seconds
    free_in: float = float("inf")  # seconds until a place is free if nobody renews

    @property
    def first(self) -> Holder:
        return self.holders[0]


Verdict = Grant | Conflict | Done


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a message in the line for a lock. Other fields: see `Conflict`."""

    at: int
    comes: bool  # a place is free for the message, or its turn is gone
    is_near: bool
    free_in: float


class Renewal(IntEnum):
    RENEWED = 1
    REPLACED = 2  # renewed; a successor asks the holder to stop
    BROKEN = 4  # renewed; a person asks the holder to stop
    TAKEN = 0  # lost: another holder has the place
    GONE = -1  # lost: nobody has the place


@dataclass(frozen=True, slots=True)
class Release:
    marker: Marker  # unknown until a release in the background has an answer
    lost: LostReason | None = None  # why the lease had been lost before, if that is known


RELEASED = Release("none")
UNANSWERED = Release("unknown")


@dataclass(frozen=True, slots=True)
class LockState:
    """All that is known of a key.

    Attributes:
        key: The lock key.
        at: When the store answered, by its clock, in microseconds.
        fence: The greatest fence that was given. None if none is remembered.
        places: Holders and cool-downs, sorted by their ends.
        marks: The marks in force.
        waiting: How many have a turn. In a line of more than 160, calls that have left may still count.
        turns: At most 160 turns: first those that nobody heard, then those that will be woken, in order.
        asked_by: Maps the token of a holder to the person who has asked it to stop.
        holders: The holders of the lock.
        queued: Task id of the queued call, or None.
        next: Task id of the call that runs next, or None.
        waiters: `waiting` under its name in `show --json`.
        cooldown_until: The end of its last cool-down, or None.
        problem: Why nothing else is known, or None.
    """

    key: str
    at: int = 0
    fence: int | None = None
    places: tuple[Holder, ...] = ()
    marks: tuple[Holder, ...] = ()
    waiting: int = 0
    turns: tuple[Holder, ...] = ()
    asked_by: Mapping[str, str] = field(default_factory=dict, repr=False)
    problem: str | None = None

    @property
    def holders(self) -> list[Holder]:
        return [holder for holder in self.places if holder.has_lease]

    @property
    def queued(self) -> str | None:
        return self._marked(HolderState.QUEUED)

    @property
    def next(self) -> str | None:
        return self._marked(HolderState.NEXT)

    @property
    def waiters(self) -> int:
        return self.waiting

    @property
    def cooldown_until(self) -> datetime | None:
        ends_in = [each.expires_in for each in (*self.places, *self.marks) if each.state is HolderState.COOLDOWN]
        return datetime.fromtimestamp(self.at / 1_000_000 + max(ends_in), UTC) if ends_in else None

    def _marked(self, state: HolderState) -> str | None:
        return next((mark.task_id for mark in self.marks if mark.state is state), None)
