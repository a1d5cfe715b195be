"""What a store of locks has to do, and the words for its answers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
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
class Claim:
    """One execution's wish to hold a lock.

    Attributes:
        key: The lock key.
        token: Proof of this claim, fresh for each execution.
        ttl: Seconds the lease lasts without renewal.
        limit: How many may hold the lock at once.
        facts: What others may know about the claimant: `task_id`, `task_name`,
            `hostname`, `pid` and `attempt`, each optional, as text.
    """

    key: str
    token: str
    ttl: float
    limit: int
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
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
    """Every place is held; *holders* are those whose deadline lies ahead."""

    key: str
    holders: tuple[Holder, ...]

    @property
    def first(self) -> Holder:
        """The holder whose lease ends first if nobody renews."""
        return min(self.holders, key=lambda holder: holder.expires_in)


class Answer(IntEnum):
    """What became of a renewal or a release."""

    DONE = 1
    TAKEN = 0
    GONE = -1


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
    def renew(self, renewals: Sequence[tuple[Claim, int]], timeout: float) -> list[Answer]:
        """Start the ttl of each claim at its place afresh; one answer each, in order.

        A lease whose deadline has passed is not revived: `GONE`.
        """

    @abstractmethod
    def release(self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND) -> Answer:
        """Give the place back; with None, whichever place the token has, if any.

        Raises:
            BackendError: No answer within *bound* seconds, or in one try if that takes longer.
        """

    @abstractmethod
    def holders(self, key: str) -> list[Holder]:
        """Who holds *key* now, the longest-lived lease last."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the store is, fit for logs: never with credentials."""


def holders_from(key: str, now: float, fields: Mapping[str, str]) -> list[Holder]:
    """Read the holders out of a lock's hash.

    Arguments:
        key: The lock key.
        now: The server's time in microseconds.
        fields: `limit`, `fence` and `<place>:<name>` for each place, see acquire.lua.
    """
    places: dict[str, dict[str, str]] = {}
    for field, value in fields.items():
        place, found, name = field.partition(":")
        if found:
            places.setdefault(place, {})[name] = value
    holders = [_holder(key, now, facts) for facts in places.values() if float(facts["deadline"]) > now]
    return sorted(holders, key=lambda holder: holder.expires_in)


def _holder(key: str, now: float, facts: Mapping[str, str]) -> Holder:
    pid = facts.get("pid")
    return Holder(
        key=key,
        token=facts["token"],
        fence=int(facts["fence"]),
        acquired_at=datetime.fromtimestamp(int(facts["since"]) / 1_000_000, UTC),
        expires_in=(float(facts["deadline"]) - now) / 1_000_000,
        task_id=facts.get("task_id"),
        task_name=facts.get("task_name", lock_name_of(key) if "task_id" in facts else None),
        hostname=facts.get("hostname"),
        pid=int(pid) if pid else None,
        attempt=int(facts.get("attempt", 0)),
    )
