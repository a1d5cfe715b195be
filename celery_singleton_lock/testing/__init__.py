"""A kit for the tests of applications: locks without a server, held by another run, lost, off, or recorded.

With pytest, `pytest_plugins = ["celery_singleton_lock.testing"]` in the `conftest.py` at the root brings the fixture
`singleton_locks`. The rest works with any test runner. The library itself does not import this package.

PYTEST_DONT_REWRITE: a `conftest.py` may import it before pytest loads it.
"""

from importlib.util import find_spec

from celery_singleton_lock.testing.holding import HELD_BY_TEST, expire, hold
from celery_singleton_lock.testing.memory import StoreInMemory, memory_store
from celery_singleton_lock.testing.off import disabled
from celery_singleton_lock.testing.recording import Acquired, Conflicted, Lost, Recorded, Released, Unanswered, recorded

if find_spec("pytest") is not None:
    # For pytest, which looks for fixtures among the names of a plugin.
    from celery_singleton_lock.testing.fixtures import SingletonLocks, singleton_lock_app, singleton_locks

__all__ = [
    "HELD_BY_TEST",
    "Acquired",
    "Conflicted",
    "Lost",
    "Recorded",
    "Released",
    "SingletonLocks",
    "StoreInMemory",
    "Unanswered",
    "disabled",
    "expire",
    "hold",
    "memory_store",
    "recorded",
    "singleton_lock_app",
    "singleton_locks",
]
