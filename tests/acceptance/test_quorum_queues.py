"""RabbitMQ's quorum queues with native delayed delivery, which knows whole seconds only."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance.conftest import forget_connections
from tests.gates import open_gate
from tests.proxy import Proxy
from tests.recorder import Event, Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

pytest.importorskip("celery.utils.quorum_queues", reason="new in Celery 5.5")

from tests.acceptance import quorum_app as quorum

pytestmark = pytest.mark.prove
APP = "tests.acceptance.quorum_app"
IN_TIME = 30


@pytest.fixture(scope="module")
def valkey(valkey_process: Server) -> Server:
    with valkey_process.client() as client:
        client.flushall()
    return valkey_process


@pytest.fixture(scope="module")
def proxy(rabbit: str) -> Iterator[Proxy]:
    with Proxy(int(rabbit.split("127.0.0.1:")[1].split("/", maxsplit=1)[0])) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def worker(valkey: Server, rabbit: str, proxy: Proxy) -> Iterator[Worker]:
    base = valkey.url.removesuffix("/0")
    quorum.app.conf.update(broker_url=rabbit, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    behind = f"amqp://guest:guest@127.0.0.1:{proxy.port}//"
    env = {"TEST_STORE": valkey.url, "TEST_BROKER": behind, "C_FORCE_ROOT": "1"}
    with workers(APP, env, 1, concurrency=4) as (worker,):
        yield worker
    forget_connections(quorum.app)
    # Results that are collected only when the server is gone complain.
    gc.collect()


def of_key(recorder: Recorder, key: str, name: str | None = None) -> list[Event]:
    return [event for event in recorder.events(name) if event.key == key]


def meets(worker: Worker, result: Any) -> None:
    until(lambda: f"task_id={result.id} holder=" in worker.log() or result.ready(), "it has met the holder")


def test_rabbitmq_itself_delays_a_message(worker: Worker) -> None:
    assert quorum.by_policy["skip"].apply_async(("delayed", 1), countdown=1).get(timeout=IN_TIME) == 1


@pytest.mark.parametrize("policy", ["reschedule", "rerun", "join"])
def test_a_message_comes_again_from_a_quorum_queue(worker: Worker, recorder: Recorder, policy: str) -> None:
    task = quorum.by_policy[policy]
    holder = task.delay(policy, 1, gate=policy)
    until(lambda: of_key(recorder, policy), "the holder runs")
    duplicate = task.delay(policy, 2)
    meets(worker, duplicate)
    open_gate(recorder, policy)

    assert holder.get(timeout=IN_TIME) == 1
    assert duplicate.get(timeout=IN_TIME) == (1 if policy == "join" else 2)
    assert overlaps(of_key(recorder, policy)) == []


def test_a_successor_in_a_quorum_queue_replaces_the_holder(worker: Worker, recorder: Recorder) -> None:
    task = quorum.by_policy["replace"]
    holder = task.delay("replace", 1, 30)
    until(lambda: of_key(recorder, "replace"), "the holder runs")
    successor = task.delay("replace", 2)

    assert successor.get(timeout=IN_TIME) == 2
    with pytest.raises(TaskRevokedError, match=successor.id):
        holder.get(timeout=IN_TIME)


def test_a_copy_from_a_quorum_queue_neither_runs_nor_ends_its_run(
    worker: Worker, recorder: Recorder, proxy: Proxy
) -> None:
    result = quorum.by_policy["skip"].delay("copied", 1, 4)
    until(lambda: of_key(recorder, "copied"), "it runs")
    # What is not acknowledged is delivered again to whoever connects anew.
    proxy.cut()
    until(lambda: worker.log().count(f"[{result.id}] received") > 1, "it is delivered again")

    assert result.get(timeout=IN_TIME) == 1
    until(is_empty, "no message is left", timeout=IN_TIME)
    assert len(of_key(recorder, "copied", "enter")) == 1
    assert result.state == "SUCCESS"


def is_empty() -> bool:
    """No message waits, and the worker keeps none."""
    kept = quorum.app.control.inspect(timeout=2)
    answers = [kept.active(), kept.reserved(), kept.scheduled()]
    with quorum.app.connection_for_read() as connection:
        channel = connection.default_channel
        queues = [quorum.QUEUE, *(f"celery_delayed_{level}" for level in range(4))]
        queued = sum(channel.queue_declare(queue, passive=True).message_count for queue in queues)
    return not queued and all(answer is not None and not any(answer.values()) for answer in answers)
