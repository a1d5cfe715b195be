"""The main process of a worker runs no code of the user's, and outlives whatever a message carries."""

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery

from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import APP as ACCEPTANCE
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

APP = "tests.acceptance.combined_app"
PROMPTLY = 15
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def worker(valkey: Server) -> Iterator[Worker]:
    with workers(APP, {"TEST_STORE": valkey.url, "TEST_TTL": "3", "C_FORCE_ROOT": "1"}, 1) as (worker,):
        yield worker


def lives(worker: Worker) -> bool:
    return bool(combined.plain.delay(7).get(timeout=PROMPTLY) == 7) and "Unrecoverable error" not in worker.log()


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["a format", "a callable", "a callable of children"])
def test_a_worker_outlives_an_expired_message_that_makes_no_key(
    tasks: Any, worker: Worker, recorder: Recorder, kind: str
) -> None:
    # By its name, for whoever published it knew no better.
    result = tasks.app.send_task(combined.keyed_by[kind].name, ("no number",), expires=LONG_AGO)

    until(lambda: f"[{result.id}] received" in worker.log(), "it is received")
    assert lives(worker)
    assert result.state == "REVOKED"
    assert recorder.events("enter") == []


@pytest.mark.parametrize("kind", ["a format", "a callable"])
def test_a_message_that_makes_no_key_fails(tasks: Any, worker: Worker, kind: str) -> None:
    result = tasks.app.send_task(combined.keyed_by[kind].name, ("no number",))

    with pytest.raises(Exception, match=r"no number|format code|concatenate"):
        result.get(timeout=PROMPTLY)
    assert result.state == "FAILURE"
    assert lives(worker)


@pytest.mark.prove
def test_a_killed_child_fails_although_the_main_process_can_make_no_key(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    task = combined.keyed_by["a callable of children"]
    result = task.delay("k", 30)
    os.kill(until(lambda: recorder.events("enter"), "it runs")[0].pid, signal.SIGKILL)

    with pytest.raises(WorkerLostError):
        result.get(timeout=PROMPTLY)
    assert result.state == "FAILURE"
    assert lives(worker)
    until(lambda: not task.lock_holders("k"), "its key is free")


@pytest.mark.prove
def test_a_callable_for_keys_is_not_called_in_the_main_process(tasks: Any, worker: Worker, recorder: Recorder) -> None:
    task = combined.keyed_by["a callable on record"]
    ran, killed = task.delay("ran"), task.delay("killed", 30)
    # Longer than a child's own heartbeat lets its main process look on.
    slow = task.delay("slow", 3)
    until(lambda: tasks.app.control.ping(timeout=0.5), "the worker listens")
    expired = task.apply_async(("expired",), expires=datetime.now(UTC) + timedelta(milliseconds=1))
    revoked = task.apply_async(("revoked",), countdown=1)
    revoked.revoke()

    assert ran.get(timeout=PROMPTLY) == slow.get(timeout=PROMPTLY) == "ran"
    (run,) = [event for event in recorder.events("enter") if event.key == "killed"]
    os.kill(run.pid, signal.SIGKILL)
    for result in (killed, expired, revoked):
        result.get(timeout=PROMPTLY, propagate=False)

    makers = {int(pid) for pid in recorder._client.smembers("makers of keys")}
    assert worker.pid not in makers


@pytest.mark.prove
@pytest.mark.skipif(not hasattr(Celery().conf, "worker_soft_shutdown_timeout"), reason="it is new in Celery 5.5")
def test_an_end_outlives_the_shutdown_of_its_worker(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    # While a soft shutdown waits, the worker reads of no end; then it takes all it knows for calls to be tried again.
    with workers(ACCEPTANCE, {**env, "TEST_SOFT_SHUTDOWN": "3"}, 1) as (worker,):
        result = tasks.retrying.delay("k", attempts=0, finish=1.0, fails=True)
        until(lambda: recorder.events("enter"), "it runs")
        worker.send(signal.SIGQUIT)
        until(lambda: result.state == "FAILURE", "it has ended")
        worker.wait()

        assert "Cold shutdown" in worker.log()
        # Asked for anew, because the first has been told of an end.
        assert tasks.app.AsyncResult(result.id).state == "FAILURE"
