"""Calls of one key run alone and in the order of their first refusal, whatever happens to connections and workers."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from celery_singleton_lock.stores.clock import clock
from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP, forget_connections
from tests.acceptance.test_line import TASK, heard_by, held, in_line, line_of, refused_in_the_pool, scheduled
from tests.rabbit import rabbitmq
from tests.recorder import Recorder, overlaps
from tests.servers import Server, running
from tests.waiting import until
from tests.workers import Worker, workers

CALLS = 60
AT_MOST = 6
"""So many neighbours may run out of order: whoever is away is not waited for."""
SOON = 120
POOLS = ["prefork", *(pytest.param(pool, marks=pytest.mark.prove) for pool in ("threads", "gevent", "solo"))]


def ran(recorder: Recorder) -> list[str]:
    return [event.run for event in recorder.events("enter")][1:]


def out_of_order(recorder: Recorder, order: list[str]) -> int:
    places = [order.index(each) for each in ran(recorder)]
    return sum(sooner > later for sooner, later in itertools.pairwise(places))


@pytest.mark.parametrize(
    "pool", ["threads", *(pytest.param(p, marks=pytest.mark.prove) for p in ("solo", "gevent", "eventlet"))]
)
def test_a_burst_of_one_key_runs_one_at_a_time(recorder: Recorder, pool: str) -> None:
    with workers(APP, pool=pool, concurrency=4):
        first = TASK.delay("k", 0, 1.0)
        results = [first, *(TASK.delay("k", number, 0.01) for number in range(1, 30))]
        assert [result.get(timeout=SOON) for result in results] == list(range(30))
        assert scheduled() == set()

    assert overlaps(recorder.events()) == []


@pytest.mark.usefixtures("broker")
def test_each_call_of_a_burst_is_told_once_and_runs_in_its_turn_hardly_refused_in_the_pool(recorder: Recorder) -> None:
    with workers(APP, {}, 2, concurrency=2) as both:

        def told() -> int:
            return sum(each.log().count("outcome=rescheduled") for each in both)

        with held(recorder):
            results = in_line(CALLS)
            until(lambda: told() >= CALLS, "all are told")
            order = line_of()
            # One in the worker that does not run the holder; a few if it stands still meanwhile.
            assert sum(len(refused_in_the_pool(each)) for each in both) <= 10
        assert [result.get(timeout=SOON) for result in results] == list(range(CALLS))
        assert told() == CALLS

    assert overlaps(recorder.events()) == []
    assert out_of_order(recorder, order) <= AT_MOST
    assert line_of() == []


@pytest.mark.usefixtures("broker")
def test_a_burst_of_one_key_keeps_no_other_key_waiting(recorder: Recorder) -> None:
    with workers(APP, concurrency=2), held(recorder):
        for number in range(4):
            for _ in range(40):
                TASK.delay("k")
            # Each message that waits in the worker makes room for another one.
            assert TASK.delay(f"another {number}", number).get(timeout=SOON) == number


def test_a_worker_that_dies_with_a_hundred_turns_keeps_nobody_waiting(recorder: Recorder, valkey: Server) -> None:
    with workers(APP, {"TEST_TTL": "5"}, concurrency=2) as (dies,), held(recorder):
        in_line(100)
        heard_by(valkey, 100)
        # Its message does not come to the one that dies.
        with workers(APP, {}, 1, "-Q", "other", concurrency=2):
            (lives,) = in_line(1, queue="other")
            heard_by(valkey, 101)
            dies.kill()
            assert lives.get(timeout=SOON) == 0


@pytest.mark.prove
def test_who_may_not_subscribe_asks_by_itself_and_is_told_once(recorder: Recorder, valkey: Server) -> None:
    with valkey.client() as client:
        client.execute_command("ACL SETUSER", "deaf", "on", "nopass", "~*", "+@all", "&*")
        try:
            url = valkey.url.replace("redis://", "redis://deaf:x@").removesuffix("/0") + "/2"
            with workers(APP, {"TEST_LOCKS": url}, 2, concurrency=2) as both:
                # A worker does not start without this right.
                client.execute_command("ACL SETUSER", "deaf", "resetchannels")
                with held(recorder):
                    results = [TASK.delay("k", number) for number in range(5)]
                    until(lambda: any("lock.not_subscribed" in each.log() for each in both), "it is told")
                assert [result.get(timeout=SOON) for result in results] == list(range(5))
                assert max(each.log().count("lock.not_subscribed") for each in both) == 1
        finally:
            client.acl_deluser("deaf")
    assert overlaps(recorder.events()) == []


def test_a_worker_that_ends_returns_its_first_turn_first(valkey: Server) -> None:
    with valkey.client() as broker, TASK.lock_for("k"), workers(APP, concurrency=2) as (one,):
        in_line(20)
        heard_by(valkey, 20)
        order = line_of()
        one.send(signal.SIGTERM)
        one.wait()
        # A worker that lives takes each message as soon as it is here, so it would run them in this order.
        returned = [json.loads(each)["headers"]["id"] for each in broker.lrange("celery", 0, -1)]
    places = [order.index(each) for each in returned]
    assert len(places) == 20
    assert sum(sooner > later for sooner, later in itertools.pairwise(places)) <= AT_MOST


@contextmanager
def in_order(recorder: Recorder, valkey: Server, break_while: str) -> Iterator[list[str]]:
    """Calls that wait in line, in this order; then each runs once, alone and in its turn.

    What happens inside happens while the lock is held, or while they run.
    """
    with held(recorder):
        in_line(CALLS, kwargs={"seconds": 0.03})
        heard_by(valkey, CALLS)
        order = line_of()
        # For longer than a message is on its way: who waits is away only now.
        waited_from = clock()
        until(lambda: clock() > waited_from + 2.5, "they have waited")
        if break_while == "held":
            yield order
    if break_while == "running":
        yield order
    until(lambda: set(ran(recorder)) == set(order), "all have run", timeout=SOON)
    until(lambda: len(recorder.events("leave")) == CALLS + 1, "all have ended", timeout=SOON)

    assert len(ran(recorder)) == CALLS, "each runs once"
    assert overlaps(recorder.events()) == []
    assert out_of_order(recorder, order) <= AT_MOST, [order.index(each) for each in ran(recorder)]
    assert line_of() == []


def none_on_its_way(broker: Any) -> None:
    """Plain Celery loses a message that Redis has just handed over, or whose run is about to be refused."""
    until(lambda: broker.hlen("unacked") == CALLS, "no message is on its way", timeout=SOON)


def idle(both: list[Worker], recorder: Recorder) -> Worker:
    holder = recorder.events("enter")[0]
    (other,) = [each for each in both if each.pid != os.getpgid(holder.pid)]
    return other


def listeners_at(client: Any) -> list[dict[str, str]]:
    return [each for each in client.client_list(_type="pubsub") if each["db"] == "2"]


@pytest.mark.parametrize("pool", POOLS)
def test_a_listener_whose_connection_is_cut(recorder: Recorder, valkey: Server, pool: str) -> None:
    with (
        workers(APP, {}, 2, pool=pool, concurrency=2),
        in_order(recorder, valkey, "running"),
        valkey.client() as client,
    ):
        for number in (5, 25):
            until(lambda number=number: len(ran(recorder)) > number, "some have run")
            # Not those to the broker: a message that plain Celery has not acknowledged by then runs twice.
            for each in until(lambda: listeners_at(client), "they listen"):
                client.client_kill_filter(_id=each["id"])


@pytest.mark.parametrize("pool", POOLS)
def test_a_deploy(recorder: Recorder, valkey: Server, pool: str) -> None:
    new = [Worker(APP, {}, pool=pool, concurrency=2) for _ in range(2)]
    try:
        with workers(APP, {}, 2, pool=pool, concurrency=2) as both, in_order(recorder, valkey, "running"):
            until(lambda: len(ran(recorder)) > 5, "some have run")
            for each in both:
                each.send(signal.SIGTERM)
            for each in new:
                each.start()
    finally:
        for each in new:
            each.close()


# Not gevent: without an event loop, kombu never restores the messages of a worker that has died.
@pytest.mark.prove
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_that_is_killed(recorder: Recorder, valkey: Server, pool: str) -> None:
    # Those that live have run by then.
    env = {"TEST_VISIBILITY": "25"}
    with workers(APP, env, 2, pool=pool, concurrency=2) as both, in_order(recorder, valkey, "held"):
        with valkey.client() as broker:
            none_on_its_way(broker)
        idle(both, recorder).kill()


@contextmanager
def redis_broker() -> Iterator[tuple[str, Callable[[], None]]]:
    with running("valkey", "--appendonly", "yes", "--appendfsync", "always") as server, server.client() as client:

        def restart() -> None:
            none_on_its_way(client)
            server.stop()
            server.start()

        yield server.url, restart


@contextmanager
def rabbitmq_broker() -> Iterator[tuple[str, Callable[[], None]]]:
    with rabbitmq() as rabbit:

        def restart() -> None:
            rabbit.stop()
            rabbit.start()

        yield rabbit.url, restart


@pytest.mark.prove
@pytest.mark.parametrize("broker", [redis_broker, rabbitmq_broker])
def test_a_broker_that_is_restarted(recorder: Recorder, valkey: Server, broker: Any) -> None:
    with broker() as (url, restart):
        tasks.app.conf.broker_url = url
        env = {"TEST_BROKER": url, "TEST_VISIBILITY": "16", "TEST_TTL": "30"}
        with workers(APP, env, 2, concurrency=2), ExitStack() as supervisor, in_order(recorder, valkey, "held"):
            restart()
            # kombu may end a worker whose Redis broker is gone.
            supervisor.enter_context(workers(APP, env, concurrency=2))
            # Who is away is not waited for, and kombu brings them back in an order of its own.
            heard_by(valkey, CALLS, timeout=SOON)
        forget_connections(tasks.app)
