"""A `__call__` before ours that catches the end of a run and tries again: a second run, under a lease of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, states, uuid

from celery_singleton_lock import Lease, SingletonTask
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts, Grant
from tests.servers import Server
from tests.tracing import tracer_of


class TriesAgain(SingletonTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:  # noqa: BLE001 (as users write it)
            return super().__call__(*args, **kwargs)


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    app = Celery("again", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_url=server.url, singleton_lock_ttl=5, task_default_queue=uuid())
    yield app
    app.close()


def traced(task: Any, **headers: Any) -> Any:
    task_id = uuid()
    return tracer_of(task)(task_id, (), {}, {"id": task_id, "args": (), "kwargs": {}, **headers}).info


def held_by(app: Celery, key: str, by: str = "the-holder") -> Callable[[], Any]:
    """Have another run hold the key; return what ends it."""
    store, claim = store_of(app), Claim(key, f"token of {by}", 30, facts=Facts(task_id=by))
    assert isinstance(store.acquire(claim), Grant)
    return lambda: store.release(claim, None)


@pytest.mark.parametrize(
    "delivery", [{}, {"delivery_info": {"redelivered": True}}], ids=["for the first time", "delivered again"]
)
def test_the_second_body_runs_under_a_lease_of_its_own(app: Celery, delivery: Any) -> None:
    leases: list[Lease] = []

    @app.task(base=TriesAgain, bind=True)
    def body(self: Any) -> str:
        assert self.lock.held
        assert len(self.lock_holders()) == 1
        leases.append(self.lock)
        if len(leases) == 1:
            raise OSError("the first time")
        return "done"

    assert traced(body, **delivery) is None

    first, second = leases
    assert first.token != second.token
    assert second.fence > first.fence
    assert body.lock_holders() == []


@pytest.mark.parametrize("policy", ["raise", "skip", "reschedule", "rerun", "replace"])
def test_a_call_that_finds_its_key_held_does_not_run_at_the_second_try(app: Celery, policy: str) -> None:
    bodies, queue = [], app.conf.task_default_queue

    @app.task(base=TriesAgain, lock_on_conflict=policy, lock_wait_timeout=2)
    def body() -> None:
        bodies.append(1)

    release = held_by(app, body.lock_key_for())
    outcome = traced(body, delivery_info={"exchange": "", "routing_key": queue})
    release()

    assert bodies == []
    ends = {"raise": states.FAILURE, "skip": states.IGNORED}
    assert outcome.state == ends.get(policy, states.RETRY)
    if policy not in ends:
        with app.connection_for_read() as connection:
            assert connection.default_channel.queue_declare(queue, passive=True).message_count == 1
