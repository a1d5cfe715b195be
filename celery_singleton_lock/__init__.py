"""One run at a time for Celery tasks, across all workers."""

from celery_singleton_lock import signals
from celery_singleton_lock.errors import ConfigurationError, LockHeld, LockLost, SingletonLockError, StoreError
from celery_singleton_lock.leases.lease import Lease, current_lease
from celery_singleton_lock.lock import Lock
from celery_singleton_lock.options import SingletonOptions
from celery_singleton_lock.runs.endings import CallRevoked
from celery_singleton_lock.stores.records import Holder, LockState
from celery_singleton_lock.task import SingletonTask

__version__ = "0.1.0"

__all__ = [
    "CallRevoked",
    "ConfigurationError",
    "Holder",
    "Lease",
    "Lock",
    "LockHeld",
    "LockLost",
    "LockState",
    "SingletonLockError",
    "SingletonOptions",
    "SingletonTask",
    "StoreError",
    "current_lease",
    "signals",
]
