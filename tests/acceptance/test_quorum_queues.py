"""RabbitMQ's quorum queues with native delayed delivery, which knows whole seconds only."""

import gc
from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import forget_connections, one_valkey
from tests.recorder import Recorder, of_key, overlaps
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import Worker, workers

pytest.importorskip("celery.utils.quorum_queues", reason="new in Celery 5.5")

from tests.acceptance import quorum_app as quorum

pytestmark = pytest.mark.prove
APP = "tests.acceptance.quorum_app"
valkey = one_valkey()


@pytest.fixture
def tasks(valkey: Server, rabbit: str) -> Iterator[None]:
    base = valkey.url.removesuffix("/0")
    quorum.app.conf.update(broker_url=rabbit, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    yield
    forget_connections(quorum.app)
    gc.collect()


@pytest.fixture(scope="module")
def worker(rabbit: str) -> Iterator[Worker]:
    with workers(APP, {"TEST_BROKER": rabbit}, concurrency=4) as (worker,):
        yield worker


def test_rabbitmq_itself_delays_a_message(worker: Worker) -> None:
    assert quorum.by_policy["skip"].apply_async(("delayed", 1), countdown=1).get(timeout=SOON) == 1


@pytest.mark.parametrize("policy", ["reschedule", "rerun", "join"])
def test_a_message_of_a_quorum_queue_is_requeued(worker: Worker, recorder: Recorder, policy: str) -> None:
    task = quorum.by_policy[policy]
    holder = recorder.begun(task.delay(policy, 1, gate=policy))
    duplicate = task.delay(policy, 2)
    until(lambda: f"task_id={duplicate.id} holder=" in worker.log() or duplicate.ready(), "it has met the holder")
    recorder.open_gate(policy)

    assert holder.get(timeout=SOON) == 1
    assert duplicate.get(timeout=SOON) == (1 if policy == "join" else 2)
    assert overlaps(of_key(recorder, policy)) == []
