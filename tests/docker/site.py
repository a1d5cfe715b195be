"""What the tests of this folder see, wherever its nodes run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import redis

from tests.recorder import Event, Recorder
from tests.waiting import until


class Worker(Protocol):
    """A worker with its pool."""

    def runs(self, event: Event) -> bool:
        """The event is of a body of this worker."""

    def kill(self) -> None:
        """SIGKILL all of it at once."""

    def restart(self) -> None:
        """Let it end what it runs, and start it again; returns when it is ready."""


class Store(Protocol):
    """A server of locks and results, of a kind that keeps nothing but what it was told to save."""

    def client(self) -> "redis.Redis": ...

    def restart(self) -> None:
        """Stop it and start it again; returns when it answers."""


@dataclass(frozen=True)
class Site:
    """Two workers, the store of their locks, and the record of what their bodies did."""

    workers: Sequence[Worker]
    store: Store
    recorder: Recorder

    def begun(self) -> Event:
        """The first body, once it runs."""
        return until(lambda: self.recorder.events("enter"), "a body has begun")[0]

    def worker_of(self, event: Event) -> Worker:
        return next(worker for worker in self.workers if worker.runs(event))

    def lock_keys(self) -> list[str]:
        with self.store.client() as client:
            # The counts of all tasks are no lock.
            return [key for key in client.scan_iter("singleton:*") if "{" in key]

    def keys_without_expiry(self) -> list[str]:
        with self.store.client() as client:
            return [key for key in client.scan_iter("singleton:*") if client.ttl(key) == -1]
