"""What is asked of a store of locks, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class Succession:
    """A wish to be next where the lock is held; the message that will come again is the broker's to keep.

    Attributes:
        policy: `rerun`: the first who asks stays the successor, later ones only leave their arguments.
            `replace`: the last who asks is the successor, and the holder is asked to make way.
        arguments: For `rerun`, what the successor shall run with unless somebody brings newer
            ones; empty for one who has asked before.
        asked_at: What the store's clock said when this one first asked, in microseconds; 0 at first.
    """

    policy: str
    arguments: str = ""
    asked_at: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """One execution's wish to hold a lock.

    Attributes:
        key: The lock key.
        token: Proof of this claim, fresh for each execution.
        ttl: Seconds the lease lasts without renewal.
        limit: How many may hold the lock at once.
        facts: What others may know about the claimant: `task_id`, `task_name`,
            `hostname`, `pid` and `attempt`, each optional, as text.
        min_hold: Seconds for which a released place stays taken, counted from its grant.
        succession: Wanted where no place is free.
        queued: Calls of the key are unique in the queue, so a free place belongs to the one that is queued.
    """

    key: str
    token: str
    ttl: float
    limit: int = 1
    facts: Mapping[str, str] = field(default_factory=dict)
    min_hold: float = 0.0
    succession: Succession | None = None
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """The claim was granted.

    Attributes:
        place: Which of the lock's places it has, from 1.
        fence: A number greater than that of any earlier grant of the key.
        took_over: The place was left by a holder that never released it.
        since: When it was granted, by the server's clock, in seconds since the epoch.
        sent_at: `clock()` before the request that was answered; the ttl counts from here.
        arguments: The newest ones that were left for this successor, or an empty text.
    """

    place: int
    fence: int
    took_over: bool
    since: float
    sent_at: float
    arguments: str = ""


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
    """Who holds a lock, as it described itself when it took it."""

    key: str
    token: str
    fence: int
    acquired_at: datetime
    expires_in: float
    task_id: str | None = None
    task_name: str | None = None
    hostname: str | None = None
    pid: int | None = None
    attempt: int = 0

    @property
    def age(self) -> float:
        """Seconds since it was acquired, by this machine's wall clock."""
        return max(0.0, (datetime.now(UTC) - self.acquired_at).total_seconds())


@dataclass(frozen=True, slots=True)
class Conflict:
    """Every place is held, or belongs to somebody who waits for it.

    Attributes:
        key: The lock key.
        holders: Those whose deadline lies ahead; the lease that ends first, first.
            Where nobody holds it, those who wait for it, in turn.
        successor: Task id of the one who is next, if somebody has asked to be.
        at: When the store answered, by its clock, in microseconds.
    """

    key: str
    holders: tuple[Holder, ...]
    successor: str | None = None
    at: int = 0

    @property
    def first(self) -> Holder:
        """The holder whose lease ends first if nobody renews."""
        return self.holders[0]


class Answer(IntEnum):
    """What became of a renewal or a release."""

    REPLACED = 2
    DONE = 1
    TAKEN = 0
    GONE = -1
