"""One message, one body: a message that is delivered again while its run lives, or after it has ended."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import forget_connections
from tests.acceptance.redelivery import VISIBILITY, impatient, messages_of
from tests.gates import open_gate
from tests.recorder import Event, Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.combined_app"
# Long enough for a copy to come twice.
LONG = 2 * VISIBILITY + 2.0
IN_TIME = 30


@pytest.fixture(scope="module")
def valkey(valkey_process: Server) -> Server:
    with valkey_process.client() as client:
        client.flushall()
    return valkey_process


@pytest.fixture(scope="module")
def env(valkey: Server) -> dict[str, str]:
    return {"TEST_STORE": valkey.url, "TEST_VISIBILITY": str(VISIBILITY), "C_FORCE_ROOT": "1"}


@pytest.fixture(scope="module")
def worker(env: dict[str, str]) -> Iterator[Worker]:
    with workers(APP, env, 1, concurrency=10) as (worker,):
        yield worker


@pytest.fixture(scope="module")
def without_results(env: dict[str, str]) -> Iterator[Worker]:
    """A worker that cannot read the results it has sent."""
    with workers(APP, {**env, "TEST_RESULTS": "rpc://"}, 1, "-Q", "rpc", concurrency=2) as (worker,):
        yield worker


@pytest.fixture(scope="module")
def calls(valkey: Server, worker: Worker, without_results: Worker) -> Iterator[dict[str, Any]]:
    """A call of each kind, all at once, each with its name as its key, and each longer than its message is patient."""
    base = valkey.url.removesuffix("/0")
    combined.app.conf.update(broker_url=valkey.url, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    with impatient(combined.app):
        called = {name: task.apply_async((name, 1, LONG, None, name == "tracked")) for name, task in late_tasks()}
        called["rpc"] = combined.late["skip"].apply_async(("rpc", 1, LONG), queue="rpc")
        yield called
    forget_connections(combined.app)


def late_tasks() -> list[tuple[str, Any]]:
    return list(combined.late.items())


def entered(recorder: Recorder, key: str) -> list[Event]:
    return [event for event in recorder.events("enter") if event.key == key]


def has_come_again(worker: Worker, result: Any) -> bool:
    """Celery has told of two deliveries at least."""
    return worker.log().count(f"[{result.id}] received") > 1


def is_over(valkey: Server, recorder: Recorder, key: str, result: Any, queue: str = "celery", most: int = 1) -> None:
    """Return once nothing more can come, or too much has."""
    looks = [0]

    def ended() -> bool:
        # A message on its way from the queue to a worker is in neither for a moment.
        looks[0] = 0 if messages_of(valkey, result.id, queue) else looks[0] + 1
        return looks[0] > 20 or len(entered(recorder, key)) > most

    until(ended, "no message of it is left", timeout=IN_TIME)


@pytest.mark.parametrize("name", ["skip", "replace", "rerun", "two places"])
def test_a_copy_of_a_living_run_neither_runs_nor_ends_it(
    tasks: Any, calls: dict[str, Any], worker: Worker, recorder: Recorder, valkey: Server, name: str
) -> None:
    result = calls[name]

    assert result.get(timeout=IN_TIME) == 1
    is_over(valkey, recorder, name, result)

    assert has_come_again(worker, result)
    assert overlaps([event for event in recorder.events() if event.key == name]) == []
    assert [event.facts["number"] for event in entered(recorder, name)] == [1]
    assert result.state == "SUCCESS"


def test_a_copy_of_a_run_that_waits_does_not_wait_as_well(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    task, key = combined.late["wait"], "waits"
    base = valkey.url.removesuffix("/0")
    combined.app.conf.update(broker_url=valkey.url, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    with impatient(combined.app), workers(APP, env, 2, "-Q", "line", concurrency=2) as both:
        holder = task.apply_async((key, 1), {"gate": key}, queue="line")
        until(lambda: entered(recorder, key), "it runs")
        waiter = task.apply_async((key, 2), queue="line")

        def times_parked() -> int:
            return sum(worker.log().count(f"task_id={waiter.id} holder={waiter.id} ") for worker in both)

        # One that took a turn in the other worker would not come again.
        until(lambda: times_parked() > 4, "the copy has come again and again", timeout=IN_TIME)
        open_gate(recorder, key)

        assert [holder.get(timeout=IN_TIME), waiter.get(timeout=IN_TIME)] == [1, 2]
        is_over(valkey, recorder, key, waiter, "line", most=2)
    forget_connections(combined.app)
    assert [event.facts["number"] for event in entered(recorder, key)] == [1, 2]


def test_a_copy_of_a_living_run_leaves_no_place_for_a_successor_that_never_comes(
    tasks: Any, calls: dict[str, Any], worker: Worker, recorder: Recorder
) -> None:
    assert calls["rerun"].get(timeout=IN_TIME) == 1
    assert has_come_again(worker, calls["rerun"])

    assert combined.late["rerun"].delay("rerun", 2).get(timeout=10) == 2


def test_a_copy_of_a_run_that_failed_does_not_run_although_its_start_was_stored(
    tasks: Any, calls: dict[str, Any], worker: Worker, recorder: Recorder, valkey: Server
) -> None:
    result = calls["tracked"]
    with pytest.raises(ValueError, match="1"):
        result.get(timeout=IN_TIME)
    is_over(valkey, recorder, "tracked", result)

    assert has_come_again(worker, result)
    assert len(entered(recorder, "tracked")) == 1
    assert result.state == "FAILURE"


def test_a_copy_of_a_run_whose_result_was_forgotten_does_not_run(
    tasks: Any, calls: dict[str, Any], worker: Worker, recorder: Recorder, valkey: Server
) -> None:
    is_over(valkey, recorder, "forgotten", calls["forgotten"])

    assert has_come_again(worker, calls["forgotten"])
    assert len(entered(recorder, "forgotten")) == 1


def test_a_copy_of_a_run_whose_result_no_worker_can_read_does_not_run(
    tasks: Any, calls: dict[str, Any], without_results: Worker, recorder: Recorder, valkey: Server
) -> None:
    is_over(valkey, recorder, "rpc", calls["rpc"], "rpc")

    assert has_come_again(without_results, calls["rpc"])
    assert len(entered(recorder, "rpc")) == 1


def test_a_copy_of_a_run_until_executing_does_not_end_its_call_for_one_that_is_queued(
    tasks: Any, worker: Worker, recorder: Recorder, valkey: Server
) -> None:
    task, key = combined.late_until_executing, "until_executing"
    base = valkey.url.removesuffix("/0")
    combined.app.conf.update(broker_url=valkey.url, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    with impatient(combined.app):
        first = task.apply_async((key, 1), {"gate": key})
        until(lambda: entered(recorder, key), "it runs")
        queued = task.apply_async((key, 2), countdown=60)
        try:
            assert queued.id != first.id
            # Its copy is Celery's: it runs beside it.
            until(lambda: len(entered(recorder, key)) > 1, "its copy runs", timeout=IN_TIME)
            open_gate(recorder, key)
            assert first.get(timeout=IN_TIME) == 1
            until(lambda: len(left(recorder, key)) == len(entered(recorder, key)), "nothing of it runs")
            assert first.state == "SUCCESS"
        finally:
            queued.revoke()
    forget_connections(combined.app)


def left(recorder: Recorder, key: str) -> list[Event]:
    return [event for event in recorder.events("leave") if event.key == key]


def test_a_task_id_that_is_used_again_is_no_copy(tasks: Any, worker: Worker, recorder: Recorder) -> None:
    for number in (1, 2):
        combined.own_id.apply_async(("own", number), task_id="an id of one's own", countdown=0.3)
        until(lambda n=number: len(entered(recorder, "own")) == n, f"call {number} runs", timeout=10)  # type: ignore[misc]

    assert [event.facts["number"] for event in entered(recorder, "own")] == [1, 2]
