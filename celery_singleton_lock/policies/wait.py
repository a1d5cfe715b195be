"""Waiting in place."""

from typing import Any

from celery_singleton_lock.leases.current import held_here
from celery_singleton_lock.policies.base import Policy
from celery_singleton_lock.policies.reschedule import come_again, is_out_of_patience, patience
from celery_singleton_lock.policies.skip import refuse
from celery_singleton_lock.runs import waiting
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Done


class Wait(Policy):
    """`wait`: first come, first served, in a slot of the pool."""

    def insist(self, run: Run, conflict: Conflict) -> Conflict | Done | None:
        """Queue, unless this very thread has the lock."""
        if held_here(run.key) is not None:
            return conflict
        with waiting.waiting_in_place(run, conflict.first):
            return run.lease.wait(conflict, min(patience(run, conflict), waiting.longest_wait(run)))

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """Give up, or come again by the broker and wait again, because each delivery has its full time limit."""
        if not run.can_come_again or is_out_of_patience(run, conflict):
            refuse(run, conflict.first)
        if run.lease.unreleased:
            # Give back its turn, or the message that comes again would queue behind it.
            run.lease.release()
        come_again(run, conflict)
