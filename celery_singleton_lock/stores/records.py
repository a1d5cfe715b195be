"""Requests to a store, and its answers. Durations are in seconds, and moments in microseconds since the epoch."""

import os
from binascii import b2a_base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Literal
from urllib.parse import unquote

from celery_singleton_lock.errors import LockHeld, LockHeldState, LostReason

ACQUIRE_BOUND = 5.0  # seconds

Succession = Literal["rerun", "replace"]
Outcome = Literal["ended", "stored", "retried"]
PublishMode = Literal["", "anyway", "over"]  # `anyway` ignores a cool-down, `over` also a queued call.
# Why a call counts as the newest: it was marked as `queued`, or requeued to run `next`. Empty: it does not count so.
# The newest call must run. Otherwise nobody would do the work of the older calls that have ended for it.
Newest = Literal["", "queued", "next"]


@dataclass(slots=True, kw_only=True)
class Facts:
    """What a claim and the history say about a call."""

    task_id: str = ""  # empty for a `Lock` or a beat
    task_name: str = ""  # empty if equal to the lock's name
    hostname: str = ""
    pid: int = 0
    attempt: int = 0
    published: int = 0  # when the call was first published; 0 if unknown
    label: str = ""
    keeps_result: bool = True  # others can read the result under the task id


WHOLE = "*"  # begins a token that claims the whole lock
_SAFE_IN_URLS = bytes.maketrans(b"+/", b"-_")


def new_token() -> str:
    # Read no random bytes ahead, otherwise a forked process would repeat the tokens of its parent.
    return b2a_base64(os.urandom(12), newline=False).translate(_SAFE_IN_URLS).decode()


@dataclass(slots=True)
class Claim(Facts):
    key: str
    token: str
    ttl: float
    limit: int = 1  # places of the lock; 0 grants nothing
    min_hold: float = 0.0  # cool-down, counted from the grant
    message: int = 0  # when this message was published; a retry keeps the task id, but is a new message; 0 if unknown
    may_be_copy: bool = False  # the store looks for another delivery of the message
    heeds_queued: bool = False  # leaves a free place to a queued call
    succeeds: Succession | None = None  # if refused, the call becomes the successor
    supersedes_for: float = 0.0  # how long older calls may still come, which this call supersedes
    newest: Newest = ""
    queued_for: float = 0.0  # how long the call stays queued if it is refused
    turn_for: float = 0.0  # how long the call has a turn if it is refused
    waits_here: bool = False  # the turn belongs to this process, not to the message
    rank: int = 0  # when the call got its turn; 0 for a newcomer
    refused_at: int = 0  # when the call was first refused, perhaps in an earlier run; 0 if never
    patience: float = ACQUIRE_BOUND  # for all tries together

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
    sooner: float = 0.0  # to subtract from the countdown


@dataclass(slots=True)
class Grant:
    place: int  # from 1
    fence: int
    since: float  # moment of the grant by the server's clock, but in seconds
    sent_at: float  # on `clock()`, before the request; the ttl counts from here
    took_over: bool = False
    died: Facts | None = None  # the former holder of the place


@dataclass(frozen=True, slots=True)
class Done:
    """A run of this message has ended."""

    attempt: int
    outcome: Outcome  # `retried`: another attempt follows. `ended`: the result is not stored yet.


Marker = Literal["none", "left", "unknown"]  # whether the store has a done marker


@dataclass(frozen=True, slots=True)
class Ending:
    """What later deliveries of a message learn about its run."""

    outcome: Outcome
    kept: float  # how long the broker may deliver the message again
    is_due: bool  # another delivery is likely


SlotVerb = Literal["claim", "note", "forget"]


@dataclass(frozen=True, slots=True)
class Slot:
    entry: str
    due: int
    fence: int  # of the beat's lease
    sent: int = 0  # when the entry was last sent, or a new entry's `last_run_at`; 0 if never


class HolderState(StrEnum):
    HELD = "held"
    ASKED_TO_STOP = "asked to stop"
    COOLDOWN = "cooldown"
    QUEUED = "queued"
    NEXT = "next"
    WAITING = "waiting"
    ENDED = "ended"  # its run has just ended; or it is newer than the caller, and has begun
    UNREADABLE = "unreadable"  # the key is another program's, or damaged


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of a lock, or a call that goes before others.

    Attributes:
        key: The lock key.
        token: With it and write access to the store, anybody can release the lock, so do not log it.
        state: `held`, `asked to stop`, `cooldown` or `ended`; a call that goes before is `queued`, `next` or `waiting`.
        acquired_at: When the lease was granted, by the store's clock. Without a grant, when the store answered.
        expires_in: Seconds until the lease, mark or turn ends unless it is renewed.
        fence: A number greater than that of any earlier holder. 0 without a grant.
        task_id: None for a `Lock`.
        attempt: The number of retries before this run.
        published: When the call was first published, in microseconds since the epoch. 0 if unknown.
        label: The text of `lock_label`.
        ttl: Seconds for which a renewal extends the lease. 0 if unknown.
        queue: The queue to which a queued call was published, if known.
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
    keeps_result: bool = True  # others can read the result under the task id
    call_ended: bool = False  # the call is over for Celery, so the next may be published, although this run may go on
    due_for: float = 0.0  # how long the mark lasts after the call is due; 0 stands for `lock_queue_ttl`
    queue: str | None = None
    is_unheard: bool = False  # nobody came when the turn was woken, so others are woken instead
    refused_at: int = 0  # when the turn's call was first refused

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
        return self.is_queued_or_next or self.state is HolderState.WAITING

    @property
    def is_unrenewed(self) -> bool:
        """More than half of the ttl has passed, although a renewal is due after a third."""
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
        """Seconds since `acquired_at`, by this machine's wall clock."""
        return max(0.0, (datetime.now(UTC) - self.acquired_at).total_seconds())


@dataclass(frozen=True, slots=True)
class Conflict:
    """Every place is held, or kept for a call that goes before the caller."""

    key: str
    holders: tuple[Holder, ...]  # some holders, sorted by deadline; or calls that go before the caller
    # Task id of the call that runs next, if the claim has `succeeds`. If that is another call, the caller ends.
    successor: str | None = None
    at: int = 0  # when the store answered, by its clock
    is_own: bool = False  # the holder is another delivery of the caller's message
    rank: int = 0  # of the caller's turn; 0 without a turn
    is_near: bool = True  # near the front, or not in line: poll every few seconds, because a wake may get lost
    free_in: float = float("inf")  # seconds until a place is free if nobody renews

    @property
    def first(self) -> Holder:
        return self.holders[0]


Verdict = Grant | Conflict | Done


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a message in the line. Other fields are as in `Conflict`."""

    at: int
    comes: bool  # the message must go to the pool: a place is free, or its turn is gone
    is_near: bool
    free_in: float


class Renewal(IntEnum):
    RENEWED = 1
    REPLACED = 2  # renewed, but a successor asks the holder to stop
    BROKEN = 4  # renewed, but a person asks the holder to stop
    TAKEN = 0  # lost: another holder may have the place
    GONE = -1  # lost: nobody has the place


@dataclass(frozen=True, slots=True)
class Release:
    marker: Marker
    lost: LostReason | None = None  # why the lease was lost before this release, if known


RELEASED = Release("none")
UNANSWERED = Release("unknown")


@dataclass(frozen=True, slots=True)
class LockState:
    """The state of a lock.

    Attributes:
        key: The lock key.
        at: When the store answered, by its clock, in microseconds.
        fence: The greatest fence given, or None if the store remembers none.
        places: Holders and cool-downs, sorted by their ends.
        marks: The marks in force.
        waiting: The number of turns. In a line longer than 160, this may include calls that have left.
        turns: At most 160 turns. First those for which nobody came, then the others in the order of waking.
        asked_by: Maps the token of a holder to the person who has asked it to stop.
        holders: The holders of the lock.
        queued: Task id of the queued call, or None.
        next: Task id of the call that runs next, or None.
        waiters: The same number as `waiting`, under the name that `show --json` uses.
        cooldown_until: The end of the last cool-down, or None.
        problem: Why the key cannot be read, or None.
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
