"""The contract of a store of locks, and the words for its answers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Self
from urllib.parse import unquote

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.inventory import Inventory
from celery_singleton_lock.stores.records import (
    Answer,
    Claim,
    Conflict,
    Done,
    Ending,
    Grant,
    Holder,
    Outcome,
    Sent,
    Slot,
)

# CLOCK_BOOTTIME goes on while the machine is suspended, as the server's clock does.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

clock: Callable[[], float] = partial(time.clock_gettime, _CLOCK)
"""Seconds on the local clock by which deadlines are kept; it never steps."""


def lock_name_of(key: str) -> str:
    """The lock name inside *key*, without prefix and digest."""
    return unquote(key.partition("{")[2].rpartition(":")[0])


ACQUIRE_BOUND = 5.0
RELEASE_BOUND = 2.0
PUBLISH_BOUND = 2.0


class Waiter(ABC):
    """A turn in a lock's queue, from `__enter__` until it is granted or `__exit__`.

    A waiter that leaves without a grant still has to release the claim, to pass the turn on.
    """

    def __enter__(self) -> Self:
        """Begin to listen; the turn is taken by the first `ask`."""
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Stop listening."""

    @abstractmethod
    def ask(self) -> Grant | Conflict | Done | float:
        """Take the place if it is this one's turn, else tell how many seconds to sleep at most.

        Returns:
            The grant; the seconds; or, for a copy, a conflict with its own run or that it is done.

        Raises:
            StoreError: No answer within 5 s, all tries together.
        """

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Return when woken by a release, and at the latest after *seconds*."""


class LockStore(ABC):
    """A store of locks.

    Every call is bounded in time and raises `StoreError` if no usable answer came. Such a call may have worked
    nevertheless, so each is safe to repeat: acquire recognises the token it has already granted, and renew and release
    touch nothing that another token holds.

    Attributes:
        has_parts: It has several parts, each of which answers, or is silent, by itself.
        on_reconnect: Called when a store that was out of reach is there again, in whichever thread finds out.
        on_clock_step: Called with the seconds by which the store's clock was set, in whichever thread finds out.
    """

    has_parts = False
    on_reconnect: Callable[[], None] | None = None
    on_clock_step: Callable[[float], None] | None = None

    @abstractmethod
    def acquire(self, claim: Claim) -> Grant | Conflict | Done:
        """Take a free place, or tell which holders have them all.

        For a claim that may be a copy, the store first looks whether its message is done, or has a run that lives.

        Raises:
            StoreError: No answer within 5 s, all tries together.
        """

    @abstractmethod
    def waiter(self, claim: Claim) -> Waiter:
        """Queue for a place: first come, first served, woken by the release."""

    @abstractmethod
    def renew(self, claims: Sequence[Claim], timeout: float) -> Sequence[Answer | StoreError]:
        """Restart the ttl of each claim; one answer each, in order.

        `DONE` only if nobody else can have had the place; `REPLACED` and `BROKEN` are as good, but it has to make way.
        An error is that of one part of the store, which has not answered while another one has.

        Raises:
            StoreError: No answer within *timeout* seconds. Some may have been renewed.
        """

    @abstractmethod
    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        """Seconds until each claim ends unless it is renewed; None if it was not granted, or is no longer.

        Raises:
            StoreError: No answer within *timeout* seconds.
        """

    @abstractmethod
    def release(
        self, claim: Claim, place: int | None, bound: float = RELEASE_BOUND, ending: Ending | None = None
    ) -> Answer:
        """Give back the place, or the turn in the queue; if *place* is None, any place or turn that the token has.

        Arguments:
            claim: What was granted, or asked for.
            place: The place that was granted.
            bound: Seconds for all tries together, or for one try if that takes longer.
            ending: What later deliveries of the message have to know, if its run has ended for good.

        Returns:
            `MARKED` if it was released and *ending* was kept, in the same step; `DONE` if only released. With `TAKEN`
            and `GONE`, if it had been lost before, *ending* was kept as well.

        Raises:
            StoreError: No answer in time.
        """

    @abstractmethod
    def holders(self, key: str) -> list[Holder]:
        """All holders of *key*; the lease that ends first comes first.

        Raises:
            StoreError: No answer in time.
        """

    def part_of(self, key: str) -> Hashable:  # noqa: ARG002 (for a store that has parts)
        """The part of the store that has *key* now."""
        return self

    @abstractmethod
    def twin(self) -> "Store":
        """The same store over connections of its own."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the store is, fit for logs: never with credentials."""


class QueueMarks(ABC):
    """The marks in the store of calls that hold no lease, each by its task id."""

    @abstractmethod
    def mark_queued(
        self, key: str, task_id: str, seconds: float, *, limit: int, quiet: float, label: str = "", sent: Sent = ""
    ) -> Holder | None:
        """Mark a call as the one that is queued, for so many seconds.

        Arguments:
            key: The lock key.
            task_id: The call's.
            seconds: How long the mark lasts if nobody comes for it.
            limit: A number of runs: if at least so many hold the key, they are in the way as well; 0 for never.
            quiet: Seconds for which no other call of the key is published.
            label: What operators read beside the key.
            sent: If it is sent whatever is found: what its mark goes before.

        Returns:
            None if the call is marked now, else the call that is queued, runs or keeps the key quiet.

        Raises:
            StoreError: No answer within 2 s, all tries together.
        """

    @abstractmethod
    def unmark(self, key: str, task_id: str, *, quiet: bool = True, heeds: bool = False) -> Conflict | None:
        """End what a call has left: it is queued and next no longer.

        Arguments:
            key: The lock key.
            task_id: The call's.
            quiet: It does not keep the key quiet any more, either.
            heeds: Leave everything if another call is queued.

        Returns:
            The conflict with the call that is queued, or None.

        Raises:
            StoreError: No answer in time.
        """


class DoneMarkers(ABC):
    """Facts for later deliveries of a message. A run writes them as it releases; all others write them here."""

    @abstractmethod
    def mark_done(self, key: str, marker: str, attempt: int, outcome: Outcome, seconds: float) -> None:
        """Write the marker of a message, unless more is known: a later attempt, or the last word on this one.

        Raises:
            StoreError: No answer in time.
        """


class Slots(ABC):
    """Which slots of a beat's entries were sent."""

    @abstractmethod
    def claim_slot(self, key: str, slot: Slot) -> bool:
        """Claim a slot, or note that it was sent, if *slot* says when; False if that was done, or others lead.

        Raises:
            StoreError: No answer in time.
        """

    @abstractmethod
    def slots(self, key: str) -> dict[str, Slot]:
        """The last slot of each entry.

        Raises:
            StoreError: No answer in time.
        """


class Store(LockStore, QueueMarks, DoneMarkers, Slots, Inventory):
    """All that this library keeps in one place."""

    @abstractmethod
    def try_out(self, key: str, bound: float, ttls: Iterable[float] = ()) -> None:
        """Acquire *key*, which nobody else may use, wake a waiter for it by a release, and leave nothing.

        Tell in the log if leases that last *ttls* would not outlast what the store may need to come back.

        Raises:
            StoreError: Not all of it was answered within *bound* seconds.
            ConfigurationError: The store does not let us.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the idle connections."""

    @abstractmethod
    def now(self) -> int:
        """The time on the store's clock, in microseconds since the epoch.

        Raises:
            StoreError: No answer in time.
        """
