"""What a store of locks has to do, and the words for its answers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Self
from urllib.parse import unquote

# CLOCK_BOOTTIME goes on while the machine is suspended, as the server's clock does.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    """Seconds on the local clock by which deadlines are kept; it never steps."""
    return time.clock_gettime(_CLOCK)


def lock_name_of(key: str) -> str:
    """The lock name inside *key*, without prefix and digest."""
    return unquote(key.partition("{")[2].rpartition(":")[0])


ACQUIRE_BOUND = 5.0
RELEASE_BOUND = 2.0


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
    """

    key: str
    token: str
    ttl: float
    limit: int = 1
    facts: Mapping[str, str] = field(default_factory=dict)
    min_hold: float = 0.0
    succession: Succession | None = None


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


class Waiter(ABC):
    """A turn in a lock's queue, from `__enter__` until it is granted or `__exit__`.

    Who leaves without a grant still has to release the claim, to pass the turn on.
    """

    def __enter__(self) -> Self:
        """Begin to listen; the turn is taken by the first `ask`."""
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Stop listening."""

    @abstractmethod
    def ask(self) -> Grant | float:
        """Take the place if it is this one's turn, else tell how many seconds to sleep at most.

        Raises:
            BackendError: No answer within 5 s, all tries together.
        """

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Return when woken by a release, and at the latest after *seconds*."""


class Backend(ABC):
    """A store of locks.

    Every call is bounded in time and raises `BackendError` where no usable
    answer came. Such a call may have worked all the same, so each is safe to
    repeat: acquire recognises the token it has already granted, and renew and
    release touch nothing that another token holds.
    """

    @abstractmethod
    def acquire(self, claim: Claim) -> Grant | Conflict:
        """Take a free place, or tell who holds them all.

        Raises:
            BackendError: No answer within 5 s, all tries together.
            ConfigurationError: The key is held under another limit.
        """

    @abstractmethod
    def waiter(self, claim: Claim) -> Waiter:
        """Queue for a place: first come, first served, woken by the release."""

    @abstractmethod
    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        """Start the ttl of each claim afresh; one answer each, in order.

        `DONE` only if nobody else can have had the place in between; `REPLACED` is as
        good, but a successor has asked the holder to make way.

        Raises:
            BackendError: No answer within *timeout* seconds. Some may have been renewed.
        """

    @abstractmethod
    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        """Seconds until each claim ends unless it is renewed; None where it was not granted, or is not any more.

        Raises:
            BackendError: No answer within *timeout* seconds.
        """

    @abstractmethod
    def release(self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND) -> Answer:
        """Give the place, or the turn in the queue, back; with None, whichever the token has, if any.

        Raises:
            BackendError: No answer within *bound* seconds, or in one try if that takes longer.
        """

    @abstractmethod
    def holders(self, key: str) -> list[Holder]:
        """Who holds *key* now; the lease that ends first, first."""

    @abstractmethod
    def twin(self) -> "Backend":
        """The same store over connections of its own."""

    @abstractmethod
    def successor(self, key: str) -> str | None:
        """Task id of the one who is next, if somebody has asked to be.

        Raises:
            BackendError: The store did not answer in time.
        """

    @abstractmethod
    def withdraw(self, key: str, task_id: str) -> None:
        """Let the successor with that task id be next no longer.

        Raises:
            BackendError: The store did not answer in time. It may be next all the same, for half a minute.
        """

    @abstractmethod
    def note(self, key: str, text: str, seconds: float) -> None:
        """Keep *text* under *key*, which is no lock's, for so long.

        Raises:
            BackendError: The store did not answer in time.
        """

    @abstractmethod
    def noted(self, key: str) -> str | None:
        """What was noted under *key*, if it is still kept.

        Raises:
            BackendError: The store did not answer in time.
        """

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the store is, fit for logs: never with credentials."""
