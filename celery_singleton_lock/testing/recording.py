"""A record of the locks of this process, as plain values."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self

from celery import Task

from celery_singleton_lock import signals
from celery_singleton_lock.errors import REASONS_TO_STOP, LostReason, StoreError
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.lease import Lease, task_id_of
from celery_singleton_lock.stores.records import Holder
from celery_singleton_lock.stores.redis.store import RELEASE_BOUND


class Acquired(NamedTuple):
    """A lease was granted. Here and below, `task` and `task_id` are None for a `Lock`."""

    task: str | None
    task_id: str | None
    key: str
    fence: int
    waited: float
    took_over: bool


class Conflicted(NamedTuple):
    """A call found its key held by the task id `holder`; `task_id` is None if the call was not published."""

    task: str
    task_id: str | None
    key: str
    holder: str | None
    outcome: signals.ConflictOutcome


class Lost(NamedTuple):
    """A lease ended while it was needed."""

    task: str | None
    task_id: str | None
    key: str
    reason: LostReason


class Released(NamedTuple):
    """A lease was released."""

    task: str | None
    task_id: str | None
    key: str


class Unanswered(NamedTuple):
    """The store gave no answer to a run."""

    task: str
    task_id: str | None
    key: str
    problem: str
    outcome: signals.UnansweredOutcome


class Recorded:
    """The signals of this process, earliest first."""

    def __init__(self) -> None:
        self.acquired: list[Acquired] = []
        self.conflicts: list[Conflicted] = []
        self.released: list[Released] = []
        self.unanswered: list[Unanswered] = []
        self._lost: list[Lost] = []

    @property
    def lost(self) -> list[Lost]:
        """The leases that are known to be lost by now; reading it waits for the thread that reports them."""
        await_reports()
        return self._lost

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Record inside the block."""
        pairs = (
            (signals.lock_acquired, self._on_acquired),
            (signals.lock_conflict, self._on_conflict),
            (signals.lock_lost, self._on_lost),
            (signals.lock_released, self._on_released),
            (signals.lock_unanswered, self._on_unanswered),
        )
        try:
            for signal, receiver in pairs:
                # Celery before 5.7 counts the same method of two records as one receiver.
                signal.connect(receiver, weak=False, dispatch_uid=self)
            yield self
        finally:
            await_reports()
            for signal, _ in pairs:
                signal.disconnect(dispatch_uid=self)

    def _on_acquired(self, sender: Any, lease: Lease, **_: Any) -> None:
        self.acquired.append(Acquired(*_whose(sender, lease), lease.fence, lease.waited, lease.took_over))

    def _on_conflict(self, sender: Task, key: str, holder: Holder, outcome: signals.ConflictOutcome, **_: Any) -> None:
        # An unpublished call has no request. `sender.request` may belong to the body that publishes.
        task_id = None if outcome == "unpublished" else sender.request.id
        self.conflicts.append(Conflicted(sender.name, task_id, key, holder.task_id, outcome))

    def _on_lost(self, sender: Any, lease: Lease, reason: LostReason, **_: Any) -> None:
        self._lost.append(Lost(*_whose(sender, lease), reason))

    def _on_released(self, sender: Any, lease: Lease, **_: Any) -> None:
        # A body whose lease was lost has nothing to release, but one that was asked to stop still has its lease.
        if not lease.lost or lease.lost_reason in REASONS_TO_STOP:
            self.released.append(Released(*_whose(sender, lease)))

    def _on_unanswered(
        self, sender: Task, key: str, error: StoreError, outcome: signals.UnansweredOutcome, **_: Any
    ) -> None:
        self.unanswered.append(Unanswered(sender.name, sender.request.id, key, error.problem, outcome))


def recorded() -> AbstractContextManager[Recorded]:
    """Record what the locks of this process do inside the block; a pool process of a worker is another process."""
    return Recorded().listening()


def await_reports() -> None:
    """Wait until the known losses are reported, or a slow receiver takes too long."""
    reported = threading.Event()
    background.submit(reported.set)
    reported.wait(RELEASE_BOUND)


def _whose(sender: Any, lease: Lease) -> tuple[str | None, str | None, str]:
    return sender.name if isinstance(sender, Task) else None, task_id_of(lease), lease.key
