"""What a store of locks has to do, and the words for its answers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self
from urllib.parse import unquote

from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant, Holder, Slot

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
            StoreError: No answer within 5 s, all tries together.
        """

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Return when woken by a release, and at the latest after *seconds*."""


class Store(ABC):
    """A store of locks.

    Every call is bounded in time and raises `StoreError` where no usable
    answer came. Such a call may have worked all the same, so each is safe to
    repeat: acquire recognises the token it has already granted, and renew and
    release touch nothing that another token holds.
    """

    @abstractmethod
    def acquire(self, claim: Claim) -> Grant | Conflict:
        """Take a free place, or tell who holds them all.

        Raises:
            StoreError: No answer within 5 s, all tries together.
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
            StoreError: No answer within *timeout* seconds. Some may have been renewed.
        """

    @abstractmethod
    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        """Seconds until each claim ends unless it is renewed; None where it was not granted, or is not any more.

        Raises:
            StoreError: No answer within *timeout* seconds.
        """

    @abstractmethod
    def release(self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND) -> Answer:
        """Give the place, or the turn in the queue, back; with None, whichever the token has, if any.

        Raises:
            StoreError: No answer within *bound* seconds, or in one try if that takes longer.
        """

    @abstractmethod
    def holders(self, key: str) -> list[Holder]:
        """Who holds *key* now; the lease that ends first, first."""

    @abstractmethod
    def twin(self) -> "Store":
        """The same store over connections of its own."""

    @abstractmethod
    def successor(self, key: str) -> str | None:
        """Task id of the one who is next, if somebody has asked to be.

        Raises:
            StoreError: The store did not answer in time.
        """

    @abstractmethod
    def publish(self, key: str, task_id: str, seconds: float, *, counts_running: bool, quiet: float) -> Holder | None:
        """Mark a call as the one that is queued, for so many seconds.

        Arguments:
            key: The lock key.
            task_id: The call's.
            seconds: How long the mark lasts where nobody comes for it.
            counts_running: A run that holds the key is in the way as well.
            quiet: Seconds for which no other call of the key is published.

        Returns:
            None if it is, else the call that is queued, runs or keeps the key quiet.

        Raises:
            StoreError: No answer within 5 s, all tries together.
        """

    @abstractmethod
    def withdraw(self, key: str, task_id: str, *, afresh: bool = False) -> None:
        """Let the call with that task id be next, or queued, no longer; *afresh* ends what it keeps quiet, too.

        Raises:
            StoreError: The store did not answer in time. It may be next all the same, for half a minute.
        """

    @abstractmethod
    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Claim a slot, or, where *slot* tells when, note that it was sent; False if that was done, or others lead.

        Raises:
            StoreError: The store did not answer in time.
        """

    @abstractmethod
    def slots(self, key: str) -> dict[str, Slot]:
        """The last slot of each entry.

        Raises:
            StoreError: The store did not answer in time.
        """

    @abstractmethod
    def note(self, key: str, text: str, seconds: float) -> None:
        """Keep *text* under *key*, which is no lock's, for so long.

        Raises:
            StoreError: The store did not answer in time.
        """

    @abstractmethod
    def noted(self, key: str) -> str | None:
        """What was noted under *key*, if it is still kept.

        Raises:
            StoreError: The store did not answer in time.
        """

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the store is, fit for logs: never with credentials."""
