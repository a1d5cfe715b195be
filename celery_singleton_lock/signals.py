"""Celery signals that the library sends while it works.

An error of a receiver is logged, and never breaks the locking. `sender` is the task, or the class `Lock`.

`lock_lost` is sent from the background thread, one at a time: while a receiver blocks, repeated releases and log lines
wait. The other signals are sent in the thread of the task or the caller; an `async` release sends `lock_released` from
another.
"""

from contextlib import nullcontext
from typing import Any, Literal

from celery.utils.dispatch import Signal


class _Signal(Signal):
    """Celery's signal without its lock: since Python 3.13 a time limit may leave it taken for ever."""

    lock: Any = property(lambda _: nullcontext(), lambda _, lock: None)  # noqa: ARG005 (Celery sets one)


ConflictOutcome = Literal[
    "skipped", "raised", "rescheduled", "joined", "superseded", "parked", "dropped", "unpublished"
]
"""The outcomes of a call whose key was held."""
UnansweredOutcome = Literal["skipped", "raised", "rescheduled", "unlocked"]
"""The outcomes of a run to which the store gave no answer."""

lock_acquired: Signal = _Signal(name="lock_acquired", providing_args={"lease"})
"""The lease was granted and the body is about to run: `lease`, whose `waited` has the seconds of the wait."""

lock_conflict: Signal = _Signal(name="lock_conflict", providing_args={"key", "holder", "outcome"})
"""The key was held: `key`, `holder` (a `Holder`), and `outcome`: `skipped`, `raised`, `rescheduled`, `joined`,
`superseded` (the holder runs instead), `parked` (a copy of a run that has not ended, which is requeued), `dropped` (a
copy of a run that has ended), or `unpublished` (the call was not sent). A run that waits in the pool sends the signal
once it stops waiting. A call that takes its turn in the main process of a worker sends none."""

lock_unanswered: Signal = _Signal(name="lock_unanswered", providing_args={"key", "error", "outcome"})
"""The store gave no answer to a run: `key`, `error` (a `StoreError`), and `outcome`, as `lock_on_store_error` says:
`skipped`, `raised`, `rescheduled`, or `unlocked` (the body runs without a lock)."""

lock_lost: Signal = _Signal(name="lock_lost", providing_args={"lease", "reason"})
"""The lease ended while the body runs: `lease`, `reason` (`expired`, `taken`, `unreachable`, `replaced`, `broken`)."""

lock_released: Signal = _Signal(name="lock_released", providing_args={"lease"})
"""The lease was released: `lease`."""
