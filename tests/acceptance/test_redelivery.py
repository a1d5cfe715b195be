"""P3, nothing lost and nothing twice: messages that are delivered again, before and after their run has ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim, Grant
from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.proxy import Proxy
from tests.recorder import Event, Recorder, of_key
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

APP = "tests.acceptance.combined_app"
SOON = {"TEST_VISIBILITY": "3"}
GATE = "it ends"
LATE = combined.late


@pytest.fixture
def impatient_broker() -> Iterator[Any]:
    """Delivers again what was not acknowledged for three seconds."""
    options = dict(tasks.app.conf.broker_transport_options)
    tasks.app.conf.broker_transport_options = {**options, "visibility_timeout": 3}
    over = threading.Event()
    sweeper = threading.Thread(target=sweep, args=(tasks.app, over))
    sweeper.start()
    yield tasks
    over.set()
    sweeper.join()
    tasks.app.conf.broker_transport_options = options


def sweep(app: Any, over: threading.Event) -> None:
    """Do each second what a worker does each hundred seconds with a kombu before 5.7, which has no option for it."""
    with app.connection_for_read() as connection:
        while not over.wait(1):
            connection.default_channel.qos.restore_visible(interval=1)


def runs(recorder: Recorder) -> list[Event]:
    return recorder.events("enter")


def log_of(pair: list[Worker]) -> str:
    return "".join(worker.log() for worker in pair)


def test_a_copy_of_a_living_run_neither_runs_nor_ends_it(impatient_broker: Any, recorder: Recorder) -> None:
    with workers(APP, SOON, 2) as pair:
        result = LATE.delay("k", 1, gate=GATE)
        until(lambda: "outcome=parked" in log_of(pair), "a copy of it waits", timeout=30)
        recorder.open_gate(GATE)

        assert result.get(timeout=30) == 1
        until(lambda: "outcome=dropped" in log_of(pair), "the copy is dropped")
        until(broker_is_empty, "no message is left", timeout=30)

    assert len(runs(recorder)) == 1
    assert result.state == "SUCCESS"


# Red once beside other tests: no `outcome=dropped` within 30 s. The next seven plays were green.
@pytest.mark.nightly
def test_a_message_that_waited_while_its_copy_ran_is_dropped(impatient_broker: Any, recorder: Recorder) -> None:
    with workers(APP, SOON, concurrency=1) as (busy,):
        combined.by_policy["skip"].delay("its only slot", 0, gate=GATE)
        until(lambda: runs(recorder), "it is busy")
        result = combined.by_policy["skip"].delay("k", 1)
        until(lambda: f"[{result.id}] received" in busy.log(), "the message waits in the worker")

        with workers(APP, SOON, concurrency=1):
            assert result.get(timeout=30) == 1
            recorder.open_gate(GATE)
            until(lambda: "outcome=dropped" in busy.log(), "the first delivery is dropped", timeout=30)

    assert len([run for run in runs(recorder) if run.run == result.id]) == 1
    assert result.state == "SUCCESS"


def test_a_retry_after_a_long_run_waits_for_its_turn_and_does_not_come_again_and_again(recorder: Recorder) -> None:
    task, key, store = combined.retrying_late, "late", store_of(combined.app)
    with workers(APP, SOON) as (worker,):
        retried = task.delay(key, 1, countdown=1)
        until(lambda: f"[{retried.id}] retry" in worker.log(), "its first attempt has ended")
        other = Claim(task.lock_key_for(key), "another call", 3.0, task_id="another call", task_name=task.name)
        until(lambda: isinstance(store.acquire(other), Grant), "another call has the key")

        assert retried.get(timeout=30) == 1
        # Twice a second, because a message in a worker has to be requeued before the broker delivers it again.
        assert worker.log().count(f"[{retried.id}] received") < 20


def test_a_copy_runs_where_the_first_run_has_died(impatient_broker: Any, recorder: Recorder) -> None:
    with workers(APP, {**SOON, "TEST_TTL": "5"}, 2) as pair:
        result = LATE.delay("k", 1, gate=GATE)
        first = until(lambda: runs(recorder), "it runs")[0]
        dying, other = sorted(pair, key=lambda worker: worker.pid != os.getpgid(first.pid))
        # A worker that is killed while it takes a message from Redis loses it. So the other has just received the copy,
        # and after a few deliveries keeps it for half a second.
        received = f"[{result.id}] received"
        until(lambda: log_of(pair).count(received) >= 5, "the copy was parked a few times", timeout=30)
        before = other.log().count(received)
        until(lambda: other.log().count(received) > before, "the other worker has the copy", timeout=30)
        dying.kill()
        recorder.open_gate(GATE)

        assert result.get(timeout=40) == 1

    assert len(runs(recorder)) == 2


@pytest.mark.prove
# A solo pool sees a lost connection once the body has ended, so there a late acknowledgement is lost.
@pytest.mark.parametrize(("pool", "late"), [("prefork", False), ("prefork", True), ("solo", False)])
def test_a_lost_broker_connection_costs_no_second_run(broker: str, recorder: Recorder, late: bool, pool: str) -> None:
    task = LATE if late else combined.by_policy["skip"]
    with behind_a_proxy(broker) as (proxy, url), workers(APP, {"TEST_BROKER": url}, pool=pool):
        result = task.delay("k", 1, 4)
        until(lambda: runs(recorder), "it runs")
        proxy.cut()

        assert result.get(timeout=30) == 1
        assert task.delay("other").get(timeout=30) == 0

    assert len([run for run in runs(recorder) if run.run == result.id]) == 1
    assert result.state == "SUCCESS"


@pytest.mark.parametrize("children", [1, 2])
def test_a_run_that_ends_without_its_broker_does_not_run_again(rabbit: str, recorder: Recorder, children: int) -> None:
    tasks.app.conf.broker_url = rabbit
    tasks.app.control.purge()
    with behind_a_proxy(rabbit) as (proxy, url), workers(APP, {"TEST_BROKER": url}, concurrency=children) as (worker,):
        result = LATE.delay("k", 1, 2)
        until(lambda: runs(recorder), "it runs")
        proxy.reset()
        assert result.get(timeout=40) == 1
        proxy.forward()

        until(lambda: "outcome=dropped" in worker.log(), "the copy is dropped", timeout=30)

    assert len(runs(recorder)) == 1
    assert result.state == "SUCCESS"


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_redis_delivers_after_the_end_is_dropped(recorder: Recorder, valkey: Server, fails: bool) -> None:
    # A run that takes most of the visibility timeout leaves word for a copy; a shorter one does not.
    with workers(APP, SOON) as (worker,), valkey.client() as broker:
        result = LATE.delay("k", 1, 2.8, fails=fails)
        until(lambda: runs(recorder), "it runs")
        unacked = delivered(broker)
        result.get(timeout=10, propagate=False)
        deliver_again(broker, unacked)

        until(lambda: "outcome=dropped" in worker.log(), "the copy is dropped")

    assert len(runs(recorder)) == 1
    assert result.state == ("FAILURE" if fails else "SUCCESS")


def test_a_copy_does_not_store_started_over_the_end_of_its_run(recorder: Recorder, valkey: Server) -> None:
    results = f"tests.acceptance.late_started.LateStarted+{valkey.url.removesuffix('/0')}/1"
    with workers(APP, {"TEST_TRACKING": "yes", "TEST_RESULTS": results}, 1) as (worker,), valkey.client() as broker:
        result = LATE.delay("k", 1, gate=GATE, fails=True)
        until(lambda: runs(recorder), "it runs")
        assert result.state == "STARTED"
        unacked = delivered(broker)
        deliver_again(broker, unacked)
        until(lambda: "outcome=parked" in worker.log(), "its copy has met it")
        recorder.open_gate(GATE)
        until(lambda: "outcome=dropped" in worker.log(), "the copy is dropped")

    assert len(runs(recorder)) == 1
    assert result.state == "FAILURE"


def test_a_soft_time_limit_that_strikes_as_started_is_stored_ends_the_run(recorder: Recorder, valkey: Server) -> None:
    results = f"tests.acceptance.late_started.HangingStarted+{valkey.url.removesuffix('/0')}/1"
    with workers(APP, {"TEST_TRACKING": "yes", "TEST_RESULTS": results}):
        result = LATE.apply_async(("k", 1), soft_time_limit=1)
        with pytest.raises(SoftTimeLimitExceeded):
            result.get(timeout=60)

    assert runs(recorder) == []
    assert LATE.lock_holders("k", 1) == []


def test_a_waiting_message_that_comes_again_unmarked_runs_once(recorder: Recorder, valkey: Server) -> None:
    # With SQS and a queue of its own visibility timeout, which nobody has told us.
    task = tasks.by_policy["reschedule"]
    with workers("tests.acceptance.app", concurrency=1) as (worker,), valkey.client() as broker:
        with task.lock_for("k"):
            result = task.delay("k")
            until(lambda: worker.log().count(f"{result.id}] received") >= 2, "it waits here")
            unacked = delivered(broker)
            deliver_again(broker, unacked, says_so=False)
            until(lambda: worker.log().count(f"{result.id}] received") >= 3, "its copy waits, too")
        assert result.get(timeout=60) == 0
        until(lambda: "outcome=dropped" in worker.log() or len(runs(recorder)) > 1, "the other one ends", timeout=60)

    assert len(runs(recorder)) == 1


def delivered(broker: Any) -> str:
    """A message that a worker has and has yet to acknowledge; kombu may have restored a copy of it, too."""
    return str(until(lambda: broker.hvals("unacked"), "a worker has it")[0])


def deliver_again(broker: Any, unacked: str, *, says_so: bool = True) -> None:
    """As kombu restores a message whose visibility timeout has passed before its acknowledgement came."""
    message, _, queue = json.loads(unacked)
    if says_so:
        message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
    else:
        # Another tag: otherwise the acknowledgement of one delivery would count for both.
        message["properties"]["delivery_tag"] += "-again"
    broker.lpush(queue, json.dumps(message))


@pytest.mark.prove
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_of_copies_that_never_meet_one_runs(recorder: Recorder, valkey: Server, pool: str) -> None:
    result = combined.by_policy["skip"].delay("k", 1)
    with valkey.client() as broker:
        message = json.loads(broker.lpop("celery"))
        # As kombu restores a message whose visibility timeout has passed twice.
        message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
        for number in range(2):
            message["properties"]["delivery_tag"] = f"tag {number}"
            broker.lpush("celery", json.dumps(message))
    with workers(APP, {}, pool=pool, concurrency=1) as (worker,):
        assert result.get(timeout=40) == 1
        until(lambda: "outcome=dropped" in worker.log(), "the other one is dropped")

    assert len(runs(recorder)) == 1
    assert result.state == "SUCCESS"


def broker_is_empty() -> bool:
    with redis.Redis.from_url(os.environ["TEST_STORE"]) as client:
        return not client.llen("celery") and not client.hlen("unacked")


@contextmanager
def behind_a_proxy(broker: str) -> Iterator[tuple[Proxy, str]]:
    port = str(urlsplit(broker).port)
    with Proxy(int(port)) as proxy:
        yield proxy, broker.replace(port, str(proxy.port))


UNLOCKED = "it has run without a lock"
FAULTS = [
    *("its lease is lost", "its lease is lost, and no broker marks a copy", "both"),
    *("its release has no answer", UNLOCKED),
]


def copies() -> Iterator[Any]:
    for fault, later in product(FAULTS, (1, 8, 60)):
        is_quick = later == 8 and fault in FAULTS[1:3]
        # A second after an outage, the store is just being told of the end.
        if later != 1 or fault not in ("both", "its release has no answer", UNLOCKED):
            yield pytest.param(fault, later, marks=[] if is_quick else [pytest.mark.prove])


@pytest.mark.parametrize(("fault", "later"), [*copies()])
def test_a_copy_after_the_end_is_dropped(recorder: Recorder, valkey: Server, fault: str, later: int) -> None:
    task = combined.late_and_warned
    with Proxy(valkey.port) as proxy, valkey.client() as broker:
        settings = {"TEST_LOCKS": proxy.url.removesuffix("/0") + "/2", "TEST_TTL": "30"}
        with workers(APP, settings) as (worker,):
            if fault == UNLOCKED:
                proxy.black_hole()
            result = task.delay("k", 1, gate=GATE)
            until(lambda: runs(recorder), "it runs")
            unacked = delivered(broker)
            if fault.startswith("its lease is lost") or fault == "both":
                with valkey.client(2) as store:
                    store.flushdb()
            if fault in ("its release has no answer", "both"):
                proxy.black_hole()
            recorder.open_gate(GATE)
            assert result.get(timeout=30) == 1
            proxy.forward()
            time.sleep(later)
            deliver_again(broker, unacked, says_so="no broker" not in fault)

            until(lambda: "outcome=dropped" in worker.log(), "the copy is dropped", timeout=30)

    assert len(runs(recorder)) == 1
    assert result.state == "SUCCESS"


def test_a_copy_that_cannot_ask_leaves_the_end_of_its_run_as_it_is(recorder: Recorder, valkey: Server) -> None:
    with Proxy(valkey.port) as proxy, valkey.client() as broker:
        settings = {"TEST_LOCKS": proxy.url.removesuffix("/0") + "/2", "TEST_TTL": "30"}
        with workers(APP, settings) as (worker,):
            result = LATE.delay("k", 1, gate=GATE, fails=True)
            until(lambda: runs(recorder), "it runs")
            unacked = delivered(broker)
            proxy.black_hole()
            recorder.open_gate(GATE)
            with pytest.raises(ValueError, match="1"):
                result.get(timeout=30)
            deliver_again(broker, unacked)
            until(lambda: f"{result.id}] retry" in worker.log(), "its copy has asked in vain", timeout=30)

            assert tasks.app.AsyncResult(result.id).state == "FAILURE"

            proxy.forward()
            until(lambda: "outcome=dropped" in worker.log(), "the copy is dropped", timeout=60)

    assert len(runs(recorder)) == 1
    assert tasks.app.AsyncResult(result.id).state == "FAILURE"


def test_a_run_that_has_yet_to_begin_as_the_worker_stops_is_acknowledged(recorder: Recorder, valkey: Server) -> None:
    with workers(APP, concurrency=1) as (worker,), valkey.client() as client:
        LATE.delay("first").get(timeout=30)
        (first,) = runs(recorder)
        # A process that is stopped while it tells of the end of a run would stop the main process, which reads that.
        until(lambda: client.hlen("unacked") == 0, "the main process has heard of the end")
        os.kill(first.pid, signal.SIGSTOP)
        result = LATE.delay("k")
        until(lambda: f"[{result.id}] received" in worker.log(), "it is received")
        assert tasks.app.control.ping(timeout=5.0), "its process has been sent the message"
        worker.send(signal.SIGTERM)
        until(lambda: not tasks.app.control.ping(timeout=0.5), "the worker stops")
        os.kill(first.pid, signal.SIGCONT)
        worker.wait()

        assert [each.run for each in runs(recorder)][1:] == [result.id]
        assert (client.llen("celery"), client.hlen("unacked")) == (0, 0), "it would run again"


# In a process of its own, because the queues of the app are those of the whole process.
KEY = "broadcast"
PUBLISH = """
from tests.acceptance import broadcast_app
from tests.waiting import until
# A worker says that it is ready a moment before it hears what is broadcast.
until(lambda: len(broadcast_app.app.control.ping(timeout=0.5)) == 3, "three workers listen")
# Where nobody declares it, kombu's Redis takes the exchange for a direct one.
everybody = {"queue": broadcast_app.ALL, "declare": [broadcast_app.everybody.exchange]}
print(broadcast_app.skipped.apply_async(("broadcast", 1, 3), **everybody).id)
"""


@pytest.mark.prove
@pytest.mark.usefixtures("broker")
def test_siblings_of_a_run_are_skipped_and_publish_nothing(recorder: Recorder) -> None:
    with workers("tests.acceptance.broadcast_app", {}, 3, concurrency=1) as three:
        command = [sys.executable, "-c", PUBLISH]
        task_id = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        # RabbitMQ still has what an earlier test has left, and Celery says more of a message than that it came.
        until(lambda: of_key(recorder, KEY, "leave"), "it has run")
        until(lambda: all(worker.log().count(task_id) > 1 for worker in three), "each has had it")

        assert [worker.log().count(f"[{task_id}] received") for worker in three] == [1, 1, 1]
    assert len(of_key(recorder, KEY, "enter")) == 1
