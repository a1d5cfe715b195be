"""Ending at once: skipped, or failed."""

from typing import Any, NoReturn

from celery_singleton_lock.policies.base import Policy
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Holder


class Skip(Policy):
    """`skip`: the run is not done, and says which holder it left the work to."""

    ends_at_once = True

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """End with `lock_skip_result`, or as REVOKED."""
        holder = conflict.first
        run.tell(holder, "skipped")
        return run.skip(f"lock key={run.key} is held by task_id={holder.task_id}", "skipped", holder.task_id)


class Raise(Policy):
    """`raise`: the run fails."""

    ends_at_once = True

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """Fail with `LockHeld`."""
        refuse(run, conflict.first)


def refuse(run: Run, holder: Holder) -> NoReturn:
    """Fail with `LockHeld`, which names the holder."""
    run.tell(holder, "raised")
    raise run.held_by(holder)
