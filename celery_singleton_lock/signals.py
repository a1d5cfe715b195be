"""The Celery signals that the library sends.

`sender` is the task, or the class `Lock`. An error in a receiver is logged, and never breaks the locking.

`lock_lost` is sent in the background thread: a receiver that blocks also delays repeated releases and log lines. The
other signals are sent in the thread of the task or caller, but an `async` release sends `lock_released` in another.
"""

from contextlib import nullcontext
from typing import Any, Literal

from celery.utils.dispatch import Signal


class _Signal(Signal):
    """Celery's signal without its lock. Since Python 3.13, a time limit may leave that lock taken for ever."""

    lock: Any = property(lambda _: nullcontext(), lambda _, lock: None)  # noqa: ARG005 (Celery sets one)


ConflictOutcome = Literal[
    "skipped", "raised", "rescheduled", "joined", "superseded", "parked", "dropped", "unpublished"
]
"""The outcomes of a call whose key was held."""
UnansweredOutcome = Literal["skipped", "raised", "rescheduled", "unlocked"]
"""The outcomes of a run to which the store gave no answer."""

lock_acquired: Signal = _Signal(name="lock_acquired", providing_args={"lease"})
"""The lease was granted, and the body is about to run: `lease`, with the wait in seconds as `waited`."""

lock_conflict: Signal = _Signal(name="lock_conflict", providing_args={"key", "holder", "outcome"})
"""The key was held: `key`, `holder` (a `Holder`), and `outcome`: `skipped`, `raised`, `rescheduled`, `joined`,
`superseded` (the holder runs instead), `parked` (another run of the same call has not ended; this one is requeued),
`dropped` (another run of the same call has ended), or `unpublished` (the call was not sent). A run that waits in the
pool sends the signal once it stops waiting. A call that takes its turn in a worker's main process sends none."""

lock_unanswered: Signal = _Signal(name="lock_unanswered", providing_args={"key", "error", "outcome"})
"""The store gave no answer to a run: `key`, `error` (a `StoreError`), and `outcome` by `lock_on_store_error`:
`skipped`, `raised`, `rescheduled`, or `unlocked` (the body runs without a lock)."""

lock_lost: Signal = _Signal(name="lock_lost", providing_args={"lease", "reason"})
"""The lease ended, or its holder was asked to stop, while the body runs: `lease`, and `reason` (`expired`, `taken`,
`unreachable`, `replaced`, `broken`)."""

lock_released: Signal = _Signal(name="lock_released", providing_args={"lease"})
"""The lease was released: `lease`."""
