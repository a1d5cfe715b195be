"""A real worker whose broker and result backend are Sentinel's, through a failover."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import CallRevoked, SingletonTask
from tests.recorder import Recorder
from tests.replicas import go_on, halt, replicated, wait_until_replicated
from tests.sentinels import Deployment
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

APP = "tests.topologies.app"
PATIENCE = 60


@pytest.fixture
def url(shaken: Deployment) -> str:
    """As Celery reads it: each part with its scheme, the name of the master elsewhere."""
    return ";".join(f"sentinel://{host}" for host in shaken.hosts)


@pytest.fixture
def record(valkey: Server) -> str:
    return valkey.url.removesuffix("/0") + "/3"


@pytest.fixture
def tasks(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tests.topologies import app as module

    module.app.conf.update(broker_url=url, result_backend=url)
    yield module
    module.app.close()
    gc.collect()


def wait_for(result: Any) -> None:
    """Until it is stored; a message that tells of it may be lost with the connection that Celery listens on."""

    def is_stored() -> bool:
        with suppress(redis.ConnectionError, redis.TimeoutError):
            return bool(result.ready())
        return False

    until(is_stored, f"{result.id} has a result", timeout=PATIENCE)


# What redis-py and Celery leave of a connection that the master has closed is theirs.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_goes_on_through_a_failover_and_its_key_stays_taken(
    shaken: Deployment, url: str, record: str, recorder: Recorder, tasks: Any
) -> None:
    with workers(APP, {"TEST_SENTINELS": url, "TEST_RECORD": record}) as (worker,):
        first = tasks.import_catalogue.delay(7)
        until(lambda: recorder.events("enter"), "the first call runs")
        wait_until_replicated(shaken.master, 2)
        dead = shaken.master
        dead.stop()
        shaken.wait_for_another(dead)

        second = tasks.import_catalogue.delay(7)
        wait_for(second)
        with pytest.raises(CallRevoked) as revoked:
            second.get(timeout=PATIENCE)
        assert revoked.value.holder_task_id == first.id
        recorder.open_gate(f"end of {first.id}")
        wait_for(first)
        assert first.get(timeout=PATIENCE) == "imported"

        third = tasks.import_catalogue.delay(7)
        recorder.open_gate(f"end of {third.id}")
        wait_for(third)
        assert third.get(timeout=PATIENCE) == "imported"
        assert [event.run for event in recorder.events("enter")] == [first.id, third.id]
        assert "lock.lost" not in worker.log()
        assert "lock.moved" in worker.log()


def test_a_run_begins_once_a_replica_has_its_lease(record: str, recorder: Recorder, cleanup: ExitStack) -> None:
    master, (replica,) = cleanup.enter_context(replicated("redis", 1))
    publisher = Celery("shop", broker=master.url, backend=master.url, set_as_current=False)
    cleanup.callback(publisher.close)

    @publisher.task(base=SingletonTask, name=f"{APP}.import_catalogue", lock_key=("supplier_id",), shared=False)
    def import_catalogue(supplier_id: int) -> str:
        raise AssertionError(supplier_id)

    halt(replica)
    env = {"TEST_SENTINELS": master.url, "TEST_RECORD": record, "TEST_REPLICAS": "1"}
    with workers(APP, env) as (worker,):
        assert "lock.store_unreachable" in worker.log()
        call = import_catalogue.delay(7)
        until(lambda: "acknowledged by 0 of its replicas" in worker.log().partition(call.id)[2], "it has asked in vain")
        assert not recorder.events("enter")
        go_on(replica)

        recorder.open_gate(f"end of {call.id}")
        wait_for(call)
        assert call.get(timeout=PATIENCE) == "imported"
