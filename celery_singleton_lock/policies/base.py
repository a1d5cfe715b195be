"""The base class of policies."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Done, Succession


class Ended(NamedTuple):
    """The run has ended without its body, with this result or error."""

    result: Any = None
    error: BaseException | None = None

    def give(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


class Policy(ABC):
    """The fate of a run that finds its key held.

    Attributes:
        comes_again: Its runs go back to the broker.
        ends_at_once: Its runs do not wait.
        kind: By which rule its runs ask to be the successor, if they do.
    """

    comes_again = False
    ends_at_once = False
    kind: Succession | None = None

    def arrive(self, run: Run) -> Ended | None:  # noqa: ARG002
        """Before the run asks for its lock: end the run here, if the policy can end it without the lock."""
        return None

    def insist(self, run: Run, conflict: Conflict) -> Conflict | Done | None:  # noqa: ARG002
        """After the first refusal: ask for the lock once more, in the policy's own way.

        Returns:
            None if it was granted after all, else the last answer.
        """
        return conflict

    @abstractmethod
    def settle(self, run: Run, conflict: Conflict) -> Any:
        """End the run, or send it back to the broker.

        Returns:
            What the run returns in place of its body's result.

        Raises:
            LockHeld, Ignore, Retry: The other ways to end.
        """
