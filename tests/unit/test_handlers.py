"""What is heard of messages of which a worker makes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.signals import task_rejected, task_unknown
from celery.utils.objects import Bunch

from celery_singleton_lock import SingletonTask, settings
from celery_singleton_lock.leases.leftovers import leftovers
from celery_singleton_lock.runs.message import HEADER
from celery_singleton_lock.stores.memory.store import MemoryStore
from tests.waiting import until


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    app = Celery("handlers", broker="memory://", set_as_current=False)
    monkeypatch.setitem(settings._stores, app, MemoryStore())
    yield app
    app.close()


def hears(app: Celery, signal: Any, headers: Any) -> list[Any]:
    """What the receivers of *signal* have answered, as the consumer of a worker sends it."""
    consumer, message = Bunch(app=app), Bunch(headers=headers)
    return [answer for _, answer in signal.send(sender=consumer, message=message, exc=None)]


@pytest.mark.parametrize("signal", [task_unknown, task_rejected], ids=["unknown", "rejected"])
def test_a_call_that_no_worker_makes_a_request_of_is_queued_no_more(app: Celery, signal: Any) -> None:
    @app.task(base=SingletonTask, lock_mode="until_executed")
    def task() -> None: ...

    first = task.delay()
    assert task.delay().id == first.id

    hears(app, signal, {"id": first.id, HEADER: {"key": task.lock_key_for(), "marked": True}})

    until(lambda: task.delay().id != first.id, "another call is published")


@pytest.mark.parametrize("signal", [task_unknown, task_rejected], ids=["unknown", "rejected"])
@pytest.mark.parametrize(
    "headers",
    [None, [], {}, {HEADER: "mine"}, {HEADER: {"key": "k"}}, {"id": "1"}, {"id": [], HEADER: {"key": 1}}],
    ids=repr,
)
def test_whatever_a_message_carries_the_consumer_goes_on(app: Celery, signal: Any, headers: Any) -> None:
    assert not any(isinstance(answer, Exception) for answer in hears(app, signal, headers))
    assert not leftovers._left
