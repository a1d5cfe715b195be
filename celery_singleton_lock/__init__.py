"""One run at a time for Celery tasks, across all workers. `docs/glossary.md` explains the words."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery_singleton_lock import signals

if TYPE_CHECKING:
    from celery_singleton_lock.definition.options import SingletonOptions
    from celery_singleton_lock.errors import ConfigurationError, LockHeld, LockLost, SingletonLockError, StoreError
    from celery_singleton_lock.leases.lease import Lease, current_lease
    from celery_singleton_lock.lock import Lock
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


def __getattr__(name: str) -> Any:
    # Import lazily: every command of Celery loads this package, and most need nothing of it.
    if name in __all__:
        for home in ("task", "lock", "errors", "leases.lease", "definition.options", "runs.endings", "stores.records"):
            if hasattr(module := import_module(f"{__name__}.{home}"), name):
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
