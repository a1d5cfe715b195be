"""Eager mode publishes nothing, waits for nothing that cannot come, and ends as a worker would."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import LockHeld, SingletonTask
from tests.servers import Server


@pytest.fixture
def app(valkey: Server) -> Iterator[Celery]:
    app = Celery("eager", broker=valkey.url, backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_url = valkey.url.removesuffix("/0") + "/2"
    yield app
    app.close()


def messages(server: Server) -> int:
    with server.client() as broker:
        return int(broker.llen("celery"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["skip", "raise", "reschedule", "wait", "join", "rerun", "replace"])
def test_an_eager_replacement_by_an_equal_call_keeps_the_lease(app: Celery, valkey: Server, policy: str) -> None:
    leases = []

    @app.task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict=policy)
    def task(self: Any, key: str, times: int = 1) -> str:
        leases.append((self.lock.key, self.lock.fence))
        assert self.lock_holders(key)
        if times:
            return str(self.replace(self.s(key, times - 1)))
        return "replaced"

    result = task.apply(("k",))

    assert result.get() == "replaced"
    assert len(leases) == 2
    assert len(set(leases)) == 1
    assert messages(valkey) == 0
    assert task.lock_holders("k") == []


@pytest.mark.timeout(60)
def test_an_eager_call_does_not_wait_for_its_own_thread(app: Celery, valkey: Server) -> None:
    inner = []

    @app.task(base=SingletonTask, lock_key=("key",), lock_name="shared")
    def outer(key: str) -> str:
        inner.append(waits.apply((key,)))
        return "ran"

    @app.task(base=SingletonTask, lock_key=("key",), lock_name="shared", lock_on_conflict="wait")
    def waits(key: str) -> str:
        return "ran"

    result = outer.apply(("k",))

    assert result.get() == "ran"
    with pytest.raises(LockHeld, match=result.id):
        inner[0].get()
    assert messages(valkey) == 0
