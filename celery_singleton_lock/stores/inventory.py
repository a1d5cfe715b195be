"""The part of a store that serves the operator of its locks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from celery_singleton_lock.stores.records import Claim, Holder

MarkState = Literal["queued", "next", "quiet"]


@dataclass(frozen=True, slots=True)
class LeftMark:
    """A mark of a call that holds no lease.

    Attributes:
        state: `queued`, `next` or `quiet`.
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
        waiters: How many have a turn; behind the first 200 tickets, some may have left.
        turn: Seconds until the turn of the call that was asked for ends, unless it asks again; None if it has none.
        asked_by: Who has asked a holder to end, by its token.
    """

    key: str
    at: int
    fence: int | None
    holders: tuple[Holder, ...]
    marks: tuple[LeftMark, ...]
    waiters: int
    turn: float | None = None
    asked_by: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """The effect of a break.

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
    """The requests of operators, who look after the locks of others."""

    @abstractmethod
    def echo(self, bound: float) -> Echo:
        """Ask a few times for the time; of several servers, the worst answers count.

        Raises:
            StoreError: One of them was not answered within *bound* seconds.
        """

    @abstractmethod
    def about_servers(self, bound: float) -> Mapping[str, Mapping[str, str]]:
        """Each server's own report about itself, by its address; empty if there is no server.

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
            StoreError: A step was not answered in time. Of several servers, all others are asked before.
        """

    @abstractmethod
    def survey(self, keys: Sequence[str], task_id: str = "") -> list[Survey]:
        """Look at each of the keys, and change nothing.

        Arguments:
            keys: The lock keys.
            task_id: Of a call that may wait for one of them, or an empty text.

        Raises:
            StoreError: No answer in time.
        """

    @abstractmethod
    def break_lock(self, key: str, token: str | None, by: str, *, force: bool) -> Asked:
        """Ask holders to end; they hear of it at their next renewal.

        Arguments:
            key: The lock key.
            token: The token of one holder; None for all holders, and for cool-downs and marks, which end at once.
            by: The name of the person, for the result of the run.
            force: Free the places now, though bodies may go on in them.

        Raises:
            StoreError: No answer in time. It may be done all the same.
        """

    @abstractmethod
    def count(self, key: str, sums: Mapping[str, int], timeout: float) -> None:
        """Add numbers to those that are known.

        Arguments:
            key: The hash of counts.
            sums: By how much each field grows.
            timeout: Seconds, all tries together; they may be added twice if an answer is lost.

        Raises:
            StoreError: No answer in time. They may be added all the same.
        """

    @abstractmethod
    def counted(self, key: str) -> dict[str, int]:
        """All numbers, by field.

        Raises:
            StoreError: No answer in time.
        """

    @abstractmethod
    def broken_by(self, claim: Claim) -> str | None:
        """The person that has asked this holder to end, if there is one.

        Raises:
            StoreError: No answer in time.
        """
