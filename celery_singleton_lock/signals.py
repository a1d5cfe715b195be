"""What the library says while it works, as Celery signals.

A receiver that raises is logged and never breaks the locking. `sender` is the
task. `lock_lost` is sent from the heartbeat's thread, the others where the
task runs.
"""

from celery.utils.dispatch import Signal

lock_acquired = Signal(name="lock_acquired", providing_args={"lease"})
"""The lease is ours and the body is about to run: `lease`."""

lock_conflict = Signal(name="lock_conflict", providing_args={"key", "holder", "outcome"})
"""The key was held: `key`, `holder` (a `Holder`), `outcome` (`skipped`, `raised`,
`rescheduled`, `joined`, `collapsed` into the run of the holder named, `parked` for
another copy of a run that is still going on, `dropped` for one of a run that has ended, or
`unpublished`, where the call was not sent)."""

lock_lost = Signal(name="lock_lost", providing_args={"lease", "reason"})
"""The lease ended while the body runs: `lease`, `reason` (`expired`, `taken`, `unreachable`, `replaced`)."""

lock_released = Signal(name="lock_released", providing_args={"lease"})
"""The lease was given back: `lease`."""
