"""A call with `expires` that a worker has had ends as REVOKED on RabbitMQ, which drops a message whose TTL is over."""

import gc
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
from tests.acceptance.conftest import forget_connections
from tests.gates import open_gate
from tests.recorder import Recorder, of_key
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

pytestmark = pytest.mark.prove

SECONDS = 15
IN_TIME = 30


def requeued_by(task: Any, key: str) -> Callable[..., Any]:
    """A call of a key that is held for longer than the call lasts."""

    def call(recorder: Recorder, **options: Any) -> Any:
        task.delay(key, 1, gate="all have expired")
        until(lambda: of_key(recorder, key), "the holder runs")
        return task.apply_async((key, 2), **options)

    return call


def in_a_chord(recorder: Recorder, **options: Any) -> Any:
    task = combined.by_policy["reschedule"]
    task.delay("chord", 1, gate="all have expired")
    until(lambda: of_key(recorder, "chord"), "the holder runs")
    return chord([task.si("chord", 2).set(**options), combined.plain.si(1)])(combined.collect.s())


def retried(task: Any, **arguments: Any) -> Callable[..., Any]:
    def call(recorder: Recorder, **options: Any) -> Any:
        result = task.apply_async(("retry", 1), {"gate": "it retries", **arguments}, **options)
        until(lambda: of_key(recorder, "retry"), "the first attempt runs")
        return result

    return call


CLASSIC = {
    **{policy: requeued_by(combined.by_policy[policy], policy) for policy in ("reschedule", "rerun", "join")},
    "replace": requeued_by(combined.never_given_up["replace"], "replace"),
    "chord": in_a_chord,
    "retry": retried(combined.retrying_by_mode["until_executed"], countdown=0),
}


@contextmanager
def stands_still(app: Celery) -> Iterator[None]:
    """Nobody takes the messages of the queue."""
    queue = app.conf.task_default_queue
    assert app.control.cancel_consumer(queue, reply=True, timeout=IN_TIME, limit=1)
    yield
    assert app.control.add_consumer(queue, reply=True, timeout=IN_TIME, limit=1)


def all_end(app: Celery, name: str, recorder: Recorder, ways: dict[str, Callable[..., Any]]) -> None:
    """Each call ends as REVOKED, or because a member of its chord does; none of them runs."""
    with workers(name, concurrency=len(ways) + 2) as (worker,):
        moment = datetime.now(UTC) + timedelta(seconds=SECONDS)
        results = [call(recorder, expires=moment) for call in ways.values()]
        until(lambda: worker.log().count(" retry: ") >= len(ways) - 1, "the worker has had all of them")
        with stands_still(app):
            open_gate(recorder, "it retries")
            time.sleep(max(0.0, (moment - datetime.now(UTC)).total_seconds()) + 1)
        for result in results:
            with pytest.raises((TaskRevokedError, ChordError)):
                result.get(timeout=IN_TIME)
        open_gate(recorder, "all have expired")
    assert [event for event in recorder.events() if event.facts.get("number") == 2] == []


def test_a_message_that_a_worker_has_had_outlives_its_expiry_in_a_queue(rabbit: str, recorder: Recorder) -> None:
    tasks.app.conf.broker_url = rabbit
    tasks.app.control.purge()

    all_end(tasks.app, "tests.acceptance.combined_app", {"TEST_BROKER": rabbit}, recorder, CLASSIC)


def test_a_message_that_a_worker_has_had_outlives_its_expiry_in_a_quorum_queue(
    valkey: Server, rabbit: str, recorder: Recorder
) -> None:
    pytest.importorskip("celery.utils.quorum_queues", reason="new in Celery 5.5")
    from tests.acceptance import quorum_app as quorum

    base = valkey.url.removesuffix("/0")
    quorum.app.conf.update(broker_url=rabbit, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    ways = {policy: requeued_by(quorum.by_policy[policy], policy) for policy in ("reschedule", "rerun", "join")}
    ways["retry"] = retried(quorum.retrying)

    all_end(quorum.app, "tests.acceptance.quorum_app", {"TEST_BROKER": rabbit}, recorder, ways)
    forget_connections(quorum.app)
    gc.collect()
