"""The fixtures that pytest finds in the plugin."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, _state

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.testing.memory import StoreInMemory, memory_store
from celery_singleton_lock.testing.recording import Recorded

# Seconds for a body that ends at the same time as the test.
_PATIENCE = 1.0
_PAUSE = 0.01


class SingletonLocks(Recorded):
    """The record of the test's locks, and their store.

    Attributes:
        store: The store.
    """

    def __init__(self, store: StoreInMemory) -> None:
        super().__init__()
        self.store = store

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once for everything in the store."""
        self.store.advance(seconds)


@pytest.fixture
def singleton_lock_app(request: pytest.FixtureRequest) -> "Celery[Any]":
    """The app whose locks `singleton_locks` keeps in memory; define a fixture of this name to choose another.

    It is Celery's `celery_app` if the test uses that fixture, else the current app.

    Raises:
        ConfigurationError: There is no app yet.
    """
    for name in ("celery_app", "celery_session_app"):
        if name in request.fixturenames:
            app: Celery[Any] = request.getfixturevalue(name)
            return app
    app = _state.get_current_app()
    if app.main == "default":
        raise ConfigurationError(
            "singleton_locks does not know your app, because the test has imported none; define a fixture "
            "singleton_lock_app in conftest.py that returns it"
        )
    return app


@pytest.fixture
def singleton_locks(singleton_lock_app: "Celery[Any]") -> Iterator[SingletonLocks]:
    """Locks in memory, new for this test, and a record of what they did; a lock that is left held fails the test."""
    with memory_store(singleton_lock_app) as store:
        locks = SingletonLocks(store)
        with locks.listening():
            yield locks
        give_up_at = clock() + _PATIENCE
        while store.held() and clock() < give_up_at:
            time.sleep(_PAUSE)
        left = [f"key={holder.key} by task_id={holder.task_id}" for holder in store.held()]
    if left:
        pytest.fail(
            f"the test has left a lock held: {'; '.join(left)}. Release it, or wait until its body has ended",
            pytrace=False,
        )
