"""The fate of a run that finds its key held: a module for each policy."""

from celery_singleton_lock.options import OnConflict
from celery_singleton_lock.policies.base import Policy
from celery_singleton_lock.policies.join import Join
from celery_singleton_lock.policies.reschedule import Reschedule
from celery_singleton_lock.policies.skip import Raise, Skip
from celery_singleton_lock.policies.succeed import Replace, Rerun
from celery_singleton_lock.policies.wait import Wait

POLICIES: dict[OnConflict, Policy] = {
    "skip": Skip(),
    "raise": Raise(),
    "reschedule": Reschedule(),
    "wait": Wait(),
    "join": Join(),
    "rerun": Rerun(),
    "replace": Replace(),
}
