"""What becomes of the jobs of a pool as the connection to the broker is lost; real losses are in tests/acceptance."""

from types import SimpleNamespace
from typing import Any

import pytest

from celery_singleton_lock.lost_connection import LostConnection


class Job:
    def __init__(self, accepted: bool) -> None:
        self._accepted, self._ready = accepted, False

    def accepted(self) -> bool:
        return self._accepted

    def ready(self) -> bool:
        return self._ready


class ForgetfulPool:
    """As Celery's prefork pool before 5.7."""

    def __init__(self) -> None:
        self._cache = {1: Job(accepted=True), 2: Job(accepted=False), 3: Job(accepted=True)}

    def flush(self) -> None:
        self._cache[3]._ready = True
        self._cache.clear()


@pytest.fixture
def pool() -> Any:
    inner = ForgetfulPool()
    return SimpleNamespace(_pool=inner, flush=inner.flush)


@pytest.mark.parametrize("connections", [1, 2])
def test_only_what_runs_on_is_kept(pool: Any, connections: int) -> None:
    for _ in range(connections):
        LostConnection(None).start(SimpleNamespace(pool=pool))

    pool.flush()

    assert list(pool._pool._cache) == [1]


@pytest.mark.parametrize("inner", [None, object()], ids=["none", "threads"])
def test_a_pool_that_has_nothing_to_flush_stays_as_it_is(inner: Any) -> None:
    pool = SimpleNamespace(_pool=inner, flush="its own")

    LostConnection(None).start(SimpleNamespace(pool=pool))

    assert pool.flush == "its own"
