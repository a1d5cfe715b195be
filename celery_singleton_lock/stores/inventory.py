"""What a store tells, and does, for somebody who looks after its locks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from celery_singleton_lock.stores.records import Claim, Holder

MarkState = Literal["queued", "next", "quiet"]


@dataclass(frozen=True, slots=True)
class LeftMark:
    """What a call has left that holds nothing.

    Attributes:
        state: `queued`, also for a call that has joined a run; `next`; `quiet`.
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
class Survey:
    """All that is known of a key.

    Attributes:
        key: The lock key.
        at: When the store answered, by its clock, in microseconds.
        fence: The greatest that was given; None if nothing is known of it any more.
        holders: All of them, cool-downs too; the lease that ends first, first.
        marks: Those in force.
        waiters: How many have a turn; of those behind the first 200 tickets some may have left.
    """

    key: str
    at: int
    fence: int | None
    holders: tuple[Holder, ...]
    marks: tuple[LeftMark, ...]
    waiters: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What a break has done.

    Attributes:
        holders: Those that were asked to end, or whose places were freed.
        dropped: Which marks were in force and are gone; a cool-down counts as `quiet`.
    """

    holders: tuple[Holder, ...]
    dropped: tuple[MarkState, ...]


@dataclass(frozen=True, slots=True)
class Echo:
    """How a store answers.

    Attributes:
        round_trip: Seconds from a question to its answer, the median of a few.
        ahead: Seconds by which the store's clock is ahead of this machine's.
    """

    round_trip: float
    ahead: float


class Inventory(ABC):
    """For those who look after locks that are not theirs."""

    @abstractmethod
    def echo(self, bound: float) -> Echo:
        """Ask a few times for the time.

        Raises:
            StoreError: One of them was not answered within *bound* seconds.
        """

    @abstractmethod
    def about_server(self, bound: float) -> Mapping[str, str]:
        """What the server says of itself, in its own words; nothing if there is none.

        Raises:
            StoreError: No answer within *bound* seconds.
            ConfigurationError: It does not let us ask.
        """

    @abstractmethod
    def without_expiry(self, start: str) -> Iterator[str]:
        """Each key that begins with *start* and never ends by itself, which none of ours does.

        Raises:
            StoreError: A step was not answered in time.
            ConfigurationError: The store does not let us ask.
        """

    @abstractmethod
    def keys(self, start: str) -> Iterator[str]:
        """Each lock key that begins with *start*, once; found in small steps, so it may miss what comes meanwhile.

        Raises:
            StoreError: A step was not answered in time.
        """

    @abstractmethod
    def survey(self, keys: Sequence[str]) -> list[Survey]:
        """Look at each of the keys, and change nothing.

        Raises:
            StoreError: No answer in time.
        """

    @abstractmethod
    def break_lock(self, key: str, token: str | None, by: str, *, force: bool) -> Asked:
        """Ask holders to end; they hear of it at their next renewal.

        Arguments:
            key: The lock key.
            token: Of the one holder it is about; None for all of them, and for cool-downs and marks, which go at once.
            by: Who asks, for the result of the run.
            force: Free the places now, though bodies may go on in them.

        Raises:
            StoreError: No answer in time. It may be done all the same.
        """

    @abstractmethod
    def broken_by(self, claim: Claim) -> str | None:
        """Who has asked this holder to end, if somebody has.

        Raises:
            StoreError: No answer in time.
        """
