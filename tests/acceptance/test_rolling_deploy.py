"""Workers of two versions at once, which differ in `lock_limit` or `lock_on_conflict`."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery import VERSION as CELERY
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockHeld
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import one_worker
from tests.gates import open_gate
from tests.recorder import Recorder, most_at_once, of_key
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.combined_app"
PROMPTLY = 10


valkey, worker = one_worker(6)


@pytest.fixture
def opened(recorder: Recorder) -> Iterator[list[str]]:
    """The gates that are open in the end, whatever has happened."""
    gates: list[str] = []
    yield gates
    for gate in gates:
        open_gate(recorder, gate)


def holding(recorder: Recorder, opened: list[str], task: Any, key: str, number: int = 1) -> list[Any]:
    opened.append(key)
    results = [task.delay(key, n, gate=key) for n in range(number)]
    until(lambda: len(of_key(recorder, key)) == number, "they run")
    return results


@pytest.mark.parametrize("policy", combined.two_places)
def test_with_a_greater_limit_a_second_run_begins_beside_one_of_the_old_version(
    worker: Worker, recorder: Recorder, opened: list[str], policy: str
) -> None:
    key = f"greater-{policy}"
    (old,) = holding(recorder, opened, combined.one_place[policy], key)

    assert combined.two_places[policy].delay(key, 2).get(timeout=PROMPTLY) == 2
    assert most_at_once(of_key(recorder, key)) == 2
    open_gate(recorder, key)
    assert old.get(timeout=PROMPTLY) == 0


@pytest.mark.parametrize("number", [1, 2])
def test_with_a_smaller_limit_a_run_is_refused_as_its_policy_says(
    worker: Worker, recorder: Recorder, opened: list[str], number: int
) -> None:
    key = f"smaller-{number}"
    old = holding(recorder, opened, combined.two_places["skip"], key, number)
    refused = {policy: task.delay(key, 5) for policy, task in combined.one_place.items()}

    with pytest.raises(TaskRevokedError, match="|".join(result.id for result in old)):
        refused["skip"].get(timeout=PROMPTLY)
    with pytest.raises(LockHeld, match="|".join(result.id for result in old)):
        refused["raise"].get(timeout=PROMPTLY)
    open_gate(recorder, key)
    assert refused["reschedule"].get(timeout=PROMPTLY) == 5


@pytest.mark.skipif(
    CELERY < (5, 5), reason="a warm shutdown may leave what waits for its time in the worker to the visibility timeout"
)
@pytest.mark.parametrize("policy", ["skip", "reschedule", "replace"])
def test_the_newest_call_runs_though_its_task_has_another_policy_by_then(
    valkey: Server, recorder: Recorder, opened: list[str], policy: str
) -> None:
    task, key = combined.moving, f"moving-{policy}"
    version, queue = {"TEST_STORE": valkey.url}, ("-Q", key)
    with workers(APP, {**version, "TEST_MOVING": "rerun"}, 1, *queue, concurrency=2) as (old,):
        opened.append(key)
        first = task.apply_async((key, 1), {"gate": key}, queue=key)
        until(lambda: of_key(recorder, key), "the first one runs")
        second = task.apply_async((key, 2), queue=key)
        until(lambda: f"task_id={second.id} holder=" in old.log(), "the second one is next")
        third = task.apply_async((key, 3), queue=key)
        with pytest.raises(TaskRevokedError, match=third.id):
            second.get(timeout=PROMPTLY)
        # It ends what runs, and then gives the rest back.
        old.send(signal.SIGTERM)
        until(lambda: "Warm shutdown" in old.log(), "it takes nothing new")
        open_gate(recorder, key)

        with workers(APP, {**version, "TEST_MOVING": policy}, 1, *queue, concurrency=2):
            assert third.get(timeout=2 * PROMPTLY) == 3
    assert first.get(timeout=PROMPTLY) == 1
