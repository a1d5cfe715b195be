"""Waiting in place."""

from typing import Any

from celery_singleton_lock.leases.current import held_here
from celery_singleton_lock.policies.base import Policy
from celery_singleton_lock.policies.skip import refuse
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Conflict, Done


class Wait(Policy):
    """`wait`: first come, first served, in a slot of the pool."""

    def insist(self, run: Run, conflict: Conflict) -> Conflict | Done | None:
        """Queue, unless what it would wait for is this very thread."""
        if held_here(run.key) is not None:
            return conflict
        return run.lease.wait(conflict, run.options.wait_timeout)

    def settle(self, run: Run, conflict: Conflict) -> Any:
        """It has waited long enough."""
        refuse(run, conflict.first)
