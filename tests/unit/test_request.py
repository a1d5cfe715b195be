"""What the main process of a worker leaves for later deliveries of a message, where its acknowledgement may be lost.

Real messages of kombu's broker in memory, and a store in memory; only the failure of an acknowledgement is made.
"""

import gc
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from celery.worker import state
from celery.worker.request import Request

from celery_singleton_lock import LockHeld, SingletonTask, StoreError, lost_connection, request, settings
from celery_singleton_lock.definition import request_class_of
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.leftovers import leftovers
from celery_singleton_lock.lost_connection import LostConnection
from celery_singleton_lock.request import SingletonRequest
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Done, Facts
from tests.waiting import until

RUN = {
    "it has returned": None,
    "it has failed": ValueError("broken"),
    "it has retried": Retry("again", exc=ValueError("broken")),
}
TURNED_AWAY = {
    "it comes again, because another run had the key": Retry("again", exc=LockHeld("key")),
    "it comes again, because the store gave no answer": Retry("again", exc=StoreError("redis://", "down")),
    "it was parked or dropped": Ignore("another run of this very task holds the lock"),
    "it was refused": Reject("no", requeue=False),
}


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    app = Celery("requests", broker="memory://", backend="cache+memory://", set_as_current=False)
    monkeypatch.setitem(settings._stores, app, MemoryStore())
    # What a worker of this process would have told.
    monkeypatch.setattr(state, "should_stop", None)
    monkeypatch.setattr(state, "should_terminate", None)
    request.acknowledged.clear()

    @app.task(base=SingletonTask, acks_late=True)
    def task() -> None: ...

    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge("celery")
    yield task
    request.acknowledged.clear()
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


def breaks_the_acknowledgement(delivered: SingletonRequest) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("the connection is lost")

    delivered.message.ack = fail


def ends(delivered: SingletonRequest, error: Exception | None, *, elsewhere: bool = False) -> None:
    """As the pool tells the main process of it, perhaps from another process."""
    if error is None:
        delivered.on_success((False, "ran", 0.1))
        return
    try:
        raise error
    except type(error):
        info = ExceptionInfo()
        delivered.on_failure(pickle.loads(pickle.dumps(info)) if elsewhere else info)


def is_dropped_when_it_comes_again(delivered: SingletonRequest) -> bool:
    until(lambda: not leftovers._thread.runs, "what is left in the background is there")
    claim = delivered.claim
    assert claim is not None
    copy = replace(claim, token="of the copy", may_be_copy=True, facts=Facts(delivered.id))
    return isinstance(settings.store_of(delivered.app).acquire(copy), Done)


def test_a_request_that_has_ended_does_not_wait_for_the_garbage_collector(task: Any) -> None:
    gc.disable()
    try:
        with delivery_of(task) as delivered:
            ends(delivered, None)
            known = ref(delivered)
        request.acknowledged.clear()
        del delivered
        assert known() is None
    finally:
        gc.enable()


class Careful(Request):
    """What it could not save elsewhere has to come again."""

    def acknowledge(self) -> None:
        self.reject(requeue=True)


@pytest.fixture
def careful(task: Any) -> type[SingletonRequest]:
    """In a solo pool, where nothing waits for the event loop."""
    task.Request = Careful
    joined: type[SingletonRequest] = request_class_of(task, SingletonTask)
    return type("Solo", (joined,), {"worker_pid": os.getpid()})


def test_their_class_decides_whether_a_message_is_acknowledged(task: Any, careful: type[SingletonRequest]) -> None:
    with delivery_of(task, careful) as delivered:
        ends(delivered, None)
        assert delivered.message._state == "REJECTED"
        LostConnection(None).stop(None)
        assert not is_dropped_when_it_comes_again(delivered)


def test_a_request_that_their_class_rejects_does_not_wait_for_the_garbage_collector(
    task: Any, careful: type[SingletonRequest]
) -> None:
    gc.disable()
    try:
        with delivery_of(task, careful) as delivered:
            ends(delivered, None)
            known = ref(delivered)
        del delivered
        assert known() is None
    finally:
        gc.enable()


def test_a_request_that_is_acknowledged_twice_has_been_once(delivered: SingletonRequest) -> None:
    # As for a child that is killed after it was terminated; the event loop does it later.
    later: list[Any] = []
    delivered._on_ack = lambda *asked: later.append(asked)
    delivered.worker_pid = 1

    delivered.acknowledge()
    delivered.acknowledge()
    for asked in later:
        delivered.message.ack_log_error(*asked)

    assert delivered.message.acknowledged


@pytest.mark.parametrize("end", RUN)
def test_a_run_whose_acknowledgement_fails_does_not_run_again(delivered: SingletonRequest, end: str) -> None:
    breaks_the_acknowledgement(delivered)
    ends(delivered, RUN[end])

    assert is_dropped_when_it_comes_again(delivered)


@pytest.mark.parametrize("end", RUN)
def test_a_run_whose_acknowledgement_is_lost_with_the_connection_does_not_run_again(
    delivered: SingletonRequest, end: str
) -> None:
    ends(delivered, RUN[end])
    assert not is_dropped_when_it_comes_again(delivered)
    settings.store_of(delivered.app).clear()
    LostConnection(None).stop(None)

    assert is_dropped_when_it_comes_again(delivered)


def test_a_run_that_ends_after_its_connection_was_lost_does_not_run_again(
    delivered: SingletonRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "active_requests", {delivered})
    LostConnection(None).stop(None)
    ends(delivered, None)

    assert is_dropped_when_it_comes_again(delivered)


@pytest.mark.parametrize("end", TURNED_AWAY)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in a thread", "in a pool process"])
@pytest.mark.parametrize("loss", ["fails", "is lost with the connection"])
def test_a_call_that_was_turned_away_runs_later_whatever_becomes_of_its_acknowledgement(
    delivered: SingletonRequest, end: str, loss: str, elsewhere: bool
) -> None:
    if loss == "fails":
        breaks_the_acknowledgement(delivered)
    ends(delivered, TURNED_AWAY[end], elsewhere=elsewhere)
    LostConnection(None).stop(None)

    assert not is_dropped_when_it_comes_again(delivered)


def test_an_acknowledgement_that_the_broker_has_heard_leaves_nothing(
    delivered: SingletonRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(delivered, None)
    monkeypatch.setattr(lost_connection, "clock", lambda: clock() + lost_connection._LOST_WITH_THE_CONNECTION + 1)
    LostConnection(None).stop(None)

    assert not is_dropped_when_it_comes_again(delivered)


@pytest.mark.parametrize("order", ["should_stop", "should_terminate"])
def test_a_worker_that_ends_in_peace_has_lost_no_acknowledgement(
    delivered: SingletonRequest, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    ends(delivered, None)
    monkeypatch.setattr(state, order, 0)
    LostConnection(None).stop(None)

    assert not is_dropped_when_it_comes_again(delivered)


def is_accepted(delivered: SingletonRequest, monkeypatch: pytest.MonkeyPatch, seconds_ago: float) -> None:
    """By another process, as the pool tells of it."""
    monkeypatch.setattr(request, "keepalive", Keepalive(list))
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
    monkeypatch.setattr(request, "_active_requests", lambda: [broken, delivered, broken])

    (renewal,) = request._late_renewals()

    assert renewal.claim is delivered.claim
