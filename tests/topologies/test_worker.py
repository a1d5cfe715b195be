"""A real worker whose locks are with Sentinel, as are its broker and its results, or in a cluster."""

from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import CallRevoked, SingletonTask
from tests.acceptance.conftest import operated
from tests.clusters import Cluster, clustered
from tests.recorder import Recorder, overlaps
from tests.replicas import go_on, halt, replicated, wait_until_replicated
from tests.servers import Server
from tests.topologies.leases import Topology
from tests.waiting import SOON, until
from tests.workers import workers

APP = "tests.topologies.app"


@pytest.fixture
def record(valkey: Server) -> dict[str, str]:
    return {"TEST_RECORD": valkey.url.removesuffix("/0") + "/3"}


@pytest.fixture
def environment(of_each_topology: Topology, valkey: Server, record: dict[str, str]) -> dict[str, str]:
    # A failover on a machine that stands still takes longer than a usual ttl, and the lease would be lost.
    lasting = {"TEST_TTL": "120", **record}
    if isinstance(of_each_topology, Cluster):
        return {"TEST_BROKER": valkey.url, "TEST_LOCKS": of_each_topology.url, **lasting}
    # As Celery reads it: each part with its scheme, the name of the master elsewhere.
    return {"TEST_BROKER": ";".join(f"sentinel://{host}" for host in of_each_topology.hosts), **lasting}


def wait_for(result: Any) -> None:
    """Until it is stored; a message that tells of it may be lost with the connection that Celery listens on."""

    def is_stored() -> bool:
        with suppress(redis.ConnectionError, redis.TimeoutError):
            return bool(result.ready())
        return False

    until(is_stored, f"{result.id} has a result", timeout=SOON)


# What redis-py and Celery leave of a connection that the master has closed is theirs.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_goes_on_through_a_failover_and_its_key_stays_taken(
    of_each_topology: Topology, recorder: Recorder, tasks: Any
) -> None:
    topology, listed = of_each_topology, operated(tasks.app)
    with workers(APP) as (worker,):
        first = tasks.import_catalogue.delay(7)
        until(lambda: recorder.events("enter"), "the first call runs")
        key = tasks.import_catalogue.lock_key_for(7)
        assert first.id in listed("list", "--json").stdout
        dead = topology.owner(key)
        wait_until_replicated(dead, topology.replicas)
        topology.kill(dead)
        topology.wait_for_another(dead)

        second = tasks.import_catalogue.delay(7)
        wait_for(second)
        with pytest.raises(CallRevoked) as revoked:
            second.get(timeout=SOON)
        assert revoked.value.holder_task_id == first.id
        recorder.open_gate(f"end of {first.id}")
        wait_for(first)
        assert first.get(timeout=SOON) == "imported"

        third = tasks.import_catalogue.delay(7)
        recorder.open_gate(f"end of {third.id}")
        wait_for(third)
        assert third.get(timeout=SOON) == "imported"
        assert [event.run for event in recorder.events("enter")] == [first.id, third.id]
        until(lambda: listed("list", "--json").stdout.strip() == "[]", "nothing is held any more")
        assert "lock.lost" not in worker.log()
        assert isinstance(topology, Cluster) or "lock.moved" in worker.log()


@pytest.mark.parametrize("of_each_topology", [clustered], ids=["cluster"], indirect=True)
def test_calls_that_wait_are_called_through_a_failover_and_a_moved_slot(
    of_each_topology: Cluster, recorder: Recorder, tasks: Any
) -> None:
    cluster, task = of_each_topology, tasks.handle_webhook
    key = task.lock_key_for(1, 0)
    with workers(APP, {}, 2, concurrency=2):
        for number, shake in enumerate([lambda: None, lambda: cluster.fail_over(key), lambda: cluster.move(key)]):
            first = task.delay(1, -1)
            until(lambda run=first.id: run in {event.run for event in recorder.events("enter")}, "the first call runs")  # type: ignore[misc]
            waiting = [task.delay(1, 10 * number + each) for each in range(5)]
            until(lambda: task.lock_state(1, 0).waiting == 5, "the others wait")
            shake()
            recorder.open_gate(f"end of {first.id}")
            assert [each.get(timeout=SOON) for each in waiting] == [10 * number + each for each in range(5)]
            assert first.get(timeout=SOON) == -1

    assert overlaps(recorder.events()) == []


def test_a_run_begins_once_a_replica_has_its_lease(
    record: dict[str, str], recorder: Recorder, cleanup: ExitStack
) -> None:
    master, (replica,) = cleanup.enter_context(replicated("redis", 1))
    publisher = Celery("shop", broker=master.url, backend=master.url, set_as_current=False)
    cleanup.callback(publisher.close)

    @publisher.task(base=SingletonTask, name=f"{APP}.import_catalogue", lock_key=("supplier_id",), shared=False)
    def import_catalogue(supplier_id: int) -> str:
        raise AssertionError(supplier_id)

    halt(replica)
    with workers(APP, {"TEST_BROKER": master.url, "TEST_REPLICAS": "1", **record}) as (worker,):
        assert "lock.store_unreachable" in worker.log()
        call = import_catalogue.delay(7)
        until(lambda: "acknowledged by 0 of its replicas" in worker.log().partition(call.id)[2], "it has asked in vain")
        assert not recorder.events("enter")
        go_on(replica)

        recorder.open_gate(f"end of {call.id}")
        wait_for(call)
        assert call.get(timeout=SOON) == "imported"
