"""The main process of a worker runs no code of the user's, and outlives whatever a message carries."""

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from celery.app import base

from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import Worker, workers

APP = "tests.acceptance.combined_app"
WAITING = 80
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def worker(valkey: Server) -> Iterator[Worker]:
    with workers(APP, {"TEST_STORE": valkey.url, "TEST_TTL": "3"}) as (worker,):
        yield worker


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["a format", "a callable", "a callable of children"])
def test_a_worker_outlives_an_expired_message_that_makes_no_key(worker: Worker, recorder: Recorder, kind: str) -> None:
    # Sent by its name, so the publisher did not notice that it makes no key.
    result = tasks.app.send_task(combined.keyed_by[kind].name, ("no number",), expires=LONG_AGO)

    until(lambda: f"[{result.id}] received" in worker.log(), "it is received")
    assert combined.plain.delay(7).get(timeout=SOON) == 7
    assert "Unrecoverable error" not in worker.log()
    assert result.state == "REVOKED"
    assert recorder.events("enter") == []


@pytest.mark.prove
def test_a_callable_for_keys_is_not_called_in_the_main_process(worker: Worker, recorder: Recorder) -> None:
    task = combined.keyed_by["a callable on record"]
    ran, killed = task.delay("ran"), task.delay("killed", 30)
    # Longer than a child's own heartbeat lets its main process look on.
    slow = task.delay("slow", 3)
    until(lambda: tasks.app.control.ping(timeout=0.5), "the worker listens")
    expired = task.apply_async(("expired",), expires=datetime.now(UTC) + timedelta(milliseconds=1))
    revoked = task.apply_async(("revoked",), countdown=1)
    revoked.revoke()

    assert ran.get(timeout=SOON) == slow.get(timeout=SOON) == "ran"
    (run,) = [event for event in recorder.events("enter") if event.key == "killed"]
    os.kill(run.pid, signal.SIGKILL)
    for result in (killed, expired, revoked):
        result.get(timeout=SOON, propagate=False)

    assert worker.pid not in makers_of(recorder, "keys")


@pytest.mark.prove
@pytest.mark.skipif(not hasattr(base, "pydantic_wrapper"), reason="this Celery knows no models")
def test_the_main_process_makes_no_model(recorder: Recorder) -> None:
    from tests.acceptance import models_app as models

    expired = {"expires": datetime.now(UTC) - timedelta(hours=1)}
    with workers("tests.acceptance.models_app") as (worker,):
        sent = [
            models.app.send_task(models.load.name, ({"supplier_id": 1},)),
            models.app.send_task(models.load.name, ({"supplier_id": 2},), **expired),
            models.load_once.apply_async(({"supplier_id": 3},), countdown=0.5),
        ]
        for result in sent:
            result.get(timeout=SOON, propagate=False)

        assert makers_of(recorder, "models") - {worker.pid} == makers_of(recorder, "models") != set()


def makers_of(recorder: Recorder, what: str) -> set[int]:
    return {int(pid) for pid in recorder._client.smembers(f"makers of {what}")}


@pytest.mark.prove
def test_messages_that_have_waited_leave_nothing_in_the_main_process(worker: Worker, recorder: Recorder) -> None:
    task = combined.by_policy["reschedule"]

    def objects_after_a_crowd(key: str) -> int:
        results = [task.delay(key, number, gate=key) for number in range(WAITING)]
        until(lambda: task.lock_state(key).waiting == WAITING - 1, "all others wait", timeout=60)
        recorder.open_gate(key)
        for result in results:
            result.get(timeout=60)
        (said,) = tasks.app.control.broadcast("objects_in_the_main_process", reply=True, limit=1, timeout=SOON)
        return int(next(iter(said.values())))

    before, between, after = [objects_after_a_crowd(f"crowd-{number}") for number in range(3)]

    assert min(between - before, after - between) < 3 * WAITING
