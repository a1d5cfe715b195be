"""A worker that has lost its broker expects the messages of what it runs once more."""

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from celery import Celery, uuid
from celery.concurrency import gevent
from celery.utils import timer2
from celery.utils.imports import symbol_by_name
from celery.worker import state

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.runs.message import HEADER, Notes
from celery_singleton_lock.stores.records import Ending
from celery_singleton_lock.waiting import WaitingMessages
from celery_singleton_lock.worker import LostConnection
from tests.servers import Server
from tests.waiting import until


def running(app: Celery, number: int) -> list[Any]:
    @app.task(base=SingletonTask, shared=False)
    def runs(number: int) -> None: ...

    queue = app.conf.task_default_queue = uuid()
    requests = []
    with app.connection_for_read() as connection:
        for each in range(number):
            runs.delay(each)
            message = connection.default_channel.basic_get(queue, no_ack=True)
            requests.append(symbol_by_name(runs.Request)(message, app=app, task=runs, hostname="here"))
    state.active_requests.update(requests)
    return requests


@pytest.fixture
def another() -> Iterator[Celery]:
    app = Celery("another", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = f"memory://{uuid()}"
    yield app
    app.close()


def test_a_store_that_does_not_answer_costs_the_runs_at_another_store_nothing(
    app: Celery, another: Celery, server: Server
) -> None:
    app.conf.singleton_lock_url = server.url.replace("//", "//nobody:wr0ng@")
    # So many, because nobody knows in which order they are asked for.
    refused, answered = running(app, 5), running(another, 5)
    store = store_of(another)
    claims = [each.lease.claim for each in answered]
    for claim in claims:
        store.acquire(claim)

    LostConnection(None).stop(None)

    is_done = threading.Event()
    background.submit(is_done.set)
    assert is_done.wait(60)
    answers = [store.release(claim, 1, Ending("ended", 60.0, is_due=False)) for claim in claims]
    assert [answer.marker for answer in answers] == ["left"] * 5
    state.active_requests.difference_update([*refused, *answered])


@pytest.mark.parametrize("kind", [timer2.Timer, gevent.Timer], ids=["thread", "gevent"])
def test_a_worker_in_which_no_message_waits_does_nothing_with_its_timer(kind: Any) -> None:
    # A thread of Celery's that has anything to do ends a second late, and is a second late for a countdown. A greenlet
    # that repeats itself is not cancelled by its timer.
    timer = kind()
    messages = WaitingMessages(SimpleNamespace(timer=timer, hub=None, pool=None, call_soon=None))
    messages.start()
    assert not timer.queue
    messages.stop()
    assert not timer.queue


def test_a_message_that_comes_again_after_it_has_left_the_timer_was_not_delivered_twice(another: Celery) -> None:
    (request,) = running(another, 1)
    request._request_dict[HEADER] = {**request._notes().header(), "rank": 1, "task_id": request.id}
    timer, gone = timer2.Schedule(), list[Any]()
    messages = WaitingMessages(SimpleNamespace(timer=timer, hub=None, pool=None, call_soon=None))
    messages.start()

    # The timer keeps a cancelled entry until its time.
    for _ in range(2):
        entry = messages.call_at(time.monotonic() + 60, gone.append, (request,))
        entry.fun(request)

    assert gone == [request] * 2
    assert not request._notes().is_copy
    messages.call_at(time.monotonic() + 60, gone.append, (request,))
    messages.call_at(time.monotonic() + 60, gone.append, (request,))
    assert request._notes().is_copy
    messages.stop()
    state.active_requests.discard(request)


def test_a_new_call_is_no_copy_though_a_copy_hands_its_headers_on(another: Celery) -> None:
    (request,) = running(another, 1)
    state.active_requests.discard(request)

    request.expect_copies()

    assert request._notes().is_copy
    assert not Notes.of(request.request_dict, "").is_copy


def test_a_timer_keeps_no_message_that_has_started(another: Celery) -> None:
    (request,) = running(another, 1)
    request._request_dict[HEADER] = {**request._notes().header(), "rank": 1, "task_id": request.id}
    state.active_requests.discard(request)
    messages = WaitingMessages(SimpleNamespace(timer=timer2.Schedule(), hub=None, pool=None, call_soon=None))
    messages.start()
    for args in ((request,), (), (), (), ()):
        messages.call_at(time.monotonic() + 60, bool, args)

    # As its turn comes; one cancelled entry of six is not worth a walk through the timer.
    messages._go_early(next(iter(messages.waiting)))
    started = messages.queue[0].entry
    started()
    known, request, started.args = ref(request), None, ()

    until(lambda: gc.collect() is not None and known() is None, "it is forgotten")
    messages.stop()
