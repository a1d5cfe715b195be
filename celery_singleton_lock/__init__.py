"""One run at a time for Celery tasks, across all workers."""

from celery_singleton_lock import handlers, signals
from celery_singleton_lock.backends.records import Holder
from celery_singleton_lock.core.current import current_lease
from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.errors import (
    BackendError,
    ConfigurationError,
    LockHeld,
    LockLost,
    SingletonLockError,
)
from celery_singleton_lock.lock import Lock
from celery_singleton_lock.task import SingletonTask

__all__ = [
    "BackendError",
    "ConfigurationError",
    "Holder",
    "Lease",
    "Lock",
    "LockHeld",
    "LockLost",
    "SingletonLockError",
    "SingletonTask",
    "current_lease",
    "handlers",
    "signals",
]
