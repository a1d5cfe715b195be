"""A call with `expires` that a worker has had ends as REVOKED, even if RabbitMQ drops a message whose TTL is over."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chord
from celery.exceptions import ChordError, TaskRevokedError

from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import APP
from tests.acceptance.test_line import TASK, heard_by, in_line
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import workers

pytestmark = pytest.mark.prove

SECONDS = 15


def requeued_by(task: Any, key: str) -> Callable[..., Any]:

    def call(recorder: Recorder, **options: Any) -> Any:
        recorder.begun(task.delay(key, 1, gate="all have expired"))
        return task.apply_async((key, 2), **options)

    return call


def in_a_chord(recorder: Recorder, **options: Any) -> Any:
    task = combined.by_policy["reschedule"]
    recorder.begun(task.delay("chord", 1, gate="all have expired"))
    return chord([task.si("chord", 2).set(**options), combined.plain.si(1)])(combined.collect.s())


def retried(recorder: Recorder, **options: Any) -> Any:
    task = combined.retrying_by_mode["until_executed"]
    return recorder.begun(task.apply_async(("retry", 1), {"gate": "it retries", "countdown": 0}, **options))


CLASSIC = {
    **{policy: requeued_by(combined.by_policy[policy], policy) for policy in ("reschedule", "rerun", "join")},
    "replace": requeued_by(combined.never_given_up["replace"], "replace"),
    "chord": in_a_chord,
    "retry": retried,
}


@contextmanager
def stands_still(app: Celery) -> Iterator[None]:
    """Stop the worker from taking messages of the queue."""
    queue = app.conf.task_default_queue
    assert app.control.cancel_consumer(queue, reply=True, timeout=SOON, limit=1)
    yield
    assert app.control.add_consumer(queue, reply=True, timeout=SOON, limit=1)


def test_a_message_that_a_worker_has_had_outlives_its_expiry_in_a_queue(rabbit: str, recorder: Recorder) -> None:
    app = tasks.app
    app.conf.broker_url = rabbit
    app.control.purge()
    with workers(combined.__name__, {"TEST_BROKER": rabbit}, concurrency=len(CLASSIC) + 2) as (worker,):
        moment = datetime.now(UTC) + timedelta(seconds=SECONDS)
        results = [call(recorder, expires=moment) for call in CLASSIC.values()]
        until(lambda: worker.log().count(" retry: ") >= len(CLASSIC) - 1, "the worker has had all of them")
        with stands_still(app):
            recorder.open_gate("it retries")
            time.sleep(max(0.0, (moment - datetime.now(UTC)).total_seconds()) + 1)
        for result in results:
            # The call itself, or a member of its chord.
            with pytest.raises((TaskRevokedError, ChordError)):
                result.get(timeout=SOON)
        recorder.open_gate("all have expired")
    assert [event for event in recorder.events() if event.facts.get("number") == 2] == []


@pytest.mark.usefixtures("broker")
def test_a_call_that_a_deploy_returns_to_solo_ends_at_its_expiry(valkey: Server) -> None:
    with TASK.lock_for("k"):
        with workers(APP, pool="solo") as (old,):
            expires_at = time.monotonic() + 6
            (result,) = in_line(1, expires=6)
            heard_by(valkey, 1)
            old.send(signal.SIGTERM)
            old.wait()
        with workers(APP, pool="solo"):
            # Ten seconds after its start, a worker would ask by itself.
            soon = max(expires_at, time.monotonic()) + 4
            with pytest.raises(TaskRevokedError):
                result.get(timeout=SOON)
            assert time.monotonic() < soon
