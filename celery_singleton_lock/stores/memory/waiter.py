"""Turns in the queue of a lock in memory."""

from typing import Protocol

from celery_singleton_lock.stores.base import Waiter
from celery_singleton_lock.stores.records import Claim, Conflict, Done, Grant


class Queue(Protocol):
    """The part of a store that a waiter in memory needs."""

    releases: int

    def queue(self, claim: Claim) -> Grant | Conflict | Done | float:
        """Take the place, or a turn."""

    def listen(self, seen: int, seconds: float) -> None:
        """Return once more than *seen* releases have happened."""


class MemoryWaiter(Waiter):
    """A turn in a queue of this process."""

    def __init__(self, store: Queue, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self._seen = 0

    def __exit__(self, *_: object) -> None:
        """Nothing was opened to listen."""

    def ask(self) -> Grant | Conflict | Done | float:
        """Take the place if it is this one's turn."""
        # Noted before asking, so that no release in between is missed.
        self._seen = self._store.releases
        return self._store.queue(self._claim)

    def sleep(self, seconds: float) -> None:
        """Wait for any release."""
        self._store.listen(self._seen, seconds)
