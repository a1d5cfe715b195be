"""A real worker whose locks are in a cluster, through the death of a master."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from celery_singleton_lock import CallRevoked
from tests.clusters import Cluster
from tests.recorder import Recorder, overlaps
from tests.replicas import wait_until_replicated
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

APP = "tests.topologies.cluster_app"
PATIENCE = 60


@pytest.fixture
def environment(valkey: Server, shaken_cluster: Cluster) -> dict[str, str]:
    base = valkey.url.removesuffix("/0")
    return {"TEST_BROKER": f"{base}/0", "TEST_RECORD": f"{base}/3", "TEST_CLUSTER": shaken_cluster.url}


def test_a_run_goes_on_though_a_master_dies_and_its_key_stays_taken(
    shaken_cluster: Cluster, environment: dict[str, str], recorder: Recorder, tasks: Any
) -> None:
    with workers(APP, environment) as (worker,):
        first = tasks.import_catalogue.delay(7)
        until(lambda: recorder.events("enter"), "the first call runs")
        key = tasks.import_catalogue.lock_key_for(7)
        assert {row["key"]: row["task_id"] for row in listed(environment)} == {key: first.id}
        dead = shaken_cluster.owner(key)
        wait_until_replicated(dead, 1)
        shaken_cluster.kill(dead)
        shaken_cluster.wait_for_another(key, dead)

        second = tasks.import_catalogue.delay(7)
        with pytest.raises(CallRevoked) as revoked:
            second.get(timeout=PATIENCE)
        assert revoked.value.holder_task_id == first.id
        recorder.open_gate(f"end of {first.id}")
        assert first.get(timeout=PATIENCE) == "imported"

        third = tasks.import_catalogue.delay(7)
        recorder.open_gate(f"end of {third.id}")
        assert third.get(timeout=PATIENCE) == "imported"
        assert [event.run for event in recorder.events("enter")] == [first.id, third.id]
        until(lambda: listed(environment) == [], "nothing is held any more")
        assert "lock.lost" not in worker.log()


def test_calls_that_wait_are_called_through_a_failover_and_a_moved_slot(
    shaken_cluster: Cluster, environment: dict[str, str], recorder: Recorder, tasks: Any
) -> None:
    task = tasks.handle_webhook
    key = task.lock_key_for(1, 0)
    with workers(APP, environment, 2, concurrency=2):
        for number, shake in enumerate(
            [lambda: None, lambda: shaken_cluster.fail_over(key), lambda: shaken_cluster.move(key)]
        ):
            first = task.delay(1, -1)
            until(lambda run=first.id: run in {event.run for event in recorder.events("enter")}, "the first call runs")  # type: ignore[misc]
            waiting = [task.delay(1, 10 * number + each) for each in range(5)]
            until(lambda: task.lock_state(1, 0).waiting == 5, "the others wait")
            shake()
            recorder.open_gate(f"end of {first.id}")
            assert [each.get(timeout=PATIENCE) for each in waiting] == [10 * number + each for each in range(5)]
            assert first.get(timeout=PATIENCE) == -1

    assert overlaps(recorder.events()) == []


def listed(environment: dict[str, str]) -> list[dict[str, Any]]:
    """What the command line finds, at whichever server."""
    command = [sys.executable, "-m", "celery", "-A", APP, "singleton", "list", "--json"]
    told = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    rows: list[dict[str, Any]] = json.loads(told.stdout)
    return rows
