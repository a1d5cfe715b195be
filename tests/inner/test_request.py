"""Which runs the main process of a worker renews, because their own heartbeat is starved."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from celery.worker import state

from celery_singleton_lock import SingletonTask, settings, worker
from celery_singleton_lock.leases.child_renewals import ChildLeaseRenewer
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.worker import SingletonRequest


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    app = Celery("requests", broker="memory://", backend="cache+memory://", set_as_current=False)
    monkeypatch.setitem(settings._stores, app, MemoryStore())
    # What a worker of this process would have told.
    monkeypatch.setattr(state, "should_stop", None)
    monkeypatch.setattr(state, "should_terminate", None)

    @app.task(base=SingletonTask, acks_late=True)
    def task() -> None: ...

    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge("celery")
    yield task
    app.close()


@contextmanager
def delivery_of(task: Any, cls: type[SingletonRequest] = SingletonRequest) -> Iterator[SingletonRequest]:
    """A delivery that runs in this process."""
    task.delay()
    with task.app.connection_for_read() as connection:
        message = task.app.amqp.queues["celery"](connection.default_channel).get()
        assert message is not None
        errors = (ConnectionError,)
        answers = {"on_ack": message.ack_log_error, "on_reject": message.reject_log_error}
        yield cls(message, **answers, app=task.app, task=task, hostname="here", connection_errors=errors)


@pytest.fixture
def delivered(task: Any) -> Iterator[SingletonRequest]:
    with delivery_of(task) as delivered:
        yield delivered


def is_accepted(delivered: SingletonRequest, monkeypatch: pytest.MonkeyPatch, seconds_ago: float) -> None:
    """By another process, as the pool tells of it."""
    monkeypatch.setattr(worker, "child_lease_renewer", ChildLeaseRenewer(list))
    monkeypatch.setattr(state, "active_requests", set())
    delivered.on_accepted(os.getppid(), time.monotonic() - seconds_ago)


@pytest.mark.parametrize("step", [-3600.0, 0.0, 3600.0])
def test_a_body_that_starves_its_heartbeat_is_helped_whatever_the_wall_clock_says(
    delivered: SingletonRequest, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    ttl = delivered.task.lock_options.ttl
    is_accepted(delivered, monkeypatch, seconds_ago=ttl / 4)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + step)
    assert not delivered.needs_help()

    is_accepted(delivered, monkeypatch, seconds_ago=ttl / 2)
    monkeypatch.setattr(time, "time", lambda: now() + step)
    assert delivered.needs_help()


def test_a_request_that_cannot_be_looked_into_costs_no_other_its_help(
    delivered: SingletonRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of which nothing can be asked, whatever the reason.
    broken = object.__new__(SingletonRequest)
    is_accepted(delivered, monkeypatch, seconds_ago=600.0)
    monkeypatch.setattr(worker, "_active_requests", lambda: [broken, delivered, broken])

    (renewal,) = worker._late_renewals()

    assert renewal.claim == delivered.claim
