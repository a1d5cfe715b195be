"""Unique in the queue: the same call is not published twice, and no mark is left of one whose worker is gone or busy.

What a worker that goes on leaves of a call is in test_marks.py.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
from celery import chord
from kombu.exceptions import OperationalError

from tests.acceptance import app as tasks
from tests.acceptance.app import MODES
from tests.acceptance.conftest import APP, new_call
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import kill_child, workers

PUBLISH = """
from tests.acceptance.app import by_mode
for mode, task in by_mode.items():
    for _ in range(50):
        print(f"{mode} {task.delay(mode).id}")
"""


def ids_in(valkey: Server) -> set[str]:
    with valkey.client() as broker:
        messages = broker.lrange("celery", 0, -1)
    ids = {str(json.loads(message)["headers"]["id"]) for message in messages}
    assert len(ids) == len(messages)
    return ids


def test_of_many_publishers_one_message_comes_and_all_have_its_id(valkey: Server, recorder: Recorder) -> None:
    command = [sys.executable, "-c", PUBLISH]
    publishers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    published = {line for publisher in publishers for line in publisher.communicate()[0].splitlines()}

    ids = dict(line.split() for line in published)
    assert len(published) == len(ids) == len(MODES)
    assert ids_in(valkey) == {*ids.values()}
    with workers(APP):
        for mode, task_id in ids.items():
            assert tasks.app.AsyncResult(task_id).get(timeout=SOON) == 0
            assert tasks.by_mode[mode].delay(mode, 1).get(timeout=SOON) == 1
    assert len(recorder.events("enter")) == 2 * len(MODES)


def test_a_call_that_could_not_be_published_leaves_no_mark(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as away:
        away.setitem(tasks.app.conf, "broker_url", "redis://127.0.0.1:1/0")
        away.setitem(tasks.app.conf, "broker_transport_options", {"max_retries": 0})
        away.setattr(tasks.app.amqp, "_producer_pool", None)
        for task in tasks.by_mode.values():
            with pytest.raises(OperationalError):
                task.apply_async(("k",), retry=False)
    tasks.app.amqp._producer_pool = None

    assert {task.delay("k").id for task in tasks.by_mode.values() for _ in range(2)} == ids_in(valkey)


def test_a_call_that_will_never_run_is_queued_no_more() -> None:
    by_mode = tasks.by_mode.values()
    expired = [task.apply_async(("expired",), expires=0.1) for task in by_mode]
    with workers(APP):
        # A worker says that it is ready a moment before it hears of revocations.
        until(tasks.app.control.ping, "the worker listens")
        revoked = [task.apply_async(("revoked",), countdown=6) for task in by_mode]
        for each in revoked:
            each.revoke()
        for key, calls in ("expired", expired), ("revoked", revoked):
            for task, first in zip(by_mode, calls, strict=True):
                until(lambda each=first: each.state == "REVOKED", "it is revoked", timeout=SOON)
                until(lambda task=task, key=key, first=first: task.delay(key, 1).id != first.id, "another is published")


@pytest.mark.usefixtures("broker")
def test_a_call_that_the_broker_throws_away_unread_is_queued_no_more() -> None:
    task = tasks.by_mode["until_executed"]
    first = task.apply_async(("k",), expires=2)

    assert task.delay("k").id == first.id
    until(lambda: task.delay("k").id != first.id, "another is published", timeout=SOON)


def test_a_call_that_is_requeued_counts_as_queued_until_it_expires(recorder: Recorder) -> None:
    task = tasks.rescheduled_in_queue
    with workers(APP) as (worker,):
        recorder.begun(task.delay("k", 1, gate="never"))
        second = task.apply_async(("k", 2), expires=5)
        until(lambda: f"task_id={second.id} holder" in worker.log(), "it was refused, and is requeued")
        worker.kill()

    until(lambda: task.delay("k", 3).id != second.id, "another is published", timeout=SOON)


@pytest.mark.filterwarnings("ignore:Call to deprecated")  # of redis-py, by the result backend
@pytest.mark.prove
def test_a_call_with_an_own_task_id_is_not_sent_twice_and_a_canvas_is_sent_whole() -> None:
    task, free = tasks.by_mode["until_executed"], tasks.by_policy["skip"]
    first = task.apply_async(("k", 1), task_id="first", countdown=10)

    assert task.apply_async(("k", 2), task_id="second").id == first.id
    assert task.AsyncResult("second").result.args[2] == first.id
    # The body of a chord has a task id, and no other sign.
    body = chord([free.si("a"), free.si("b")])(task.si("k", 3))
    with workers(APP):
        body.get(timeout=SOON, propagate=False)
        assert body.result.reason == "skipped"
        assert first.get(timeout=SOON) == 1


def test_a_call_that_is_revoked_while_the_worker_is_busy_can_be_submitted_again_at_once(recorder: Recorder) -> None:
    task = tasks.by_mode["until_executed"]
    with workers(APP, concurrency=1):
        recorder.begun(tasks.by_policy["skip"].delay("another", gate="it ends"))
        first = task.delay("k", 1)
        duplicate = task.delay("k", 1)
        duplicate.revoke()
        second = task.delay("k", 2)
        recorder.open_gate("it ends")

        assert second.get(timeout=SOON) == 2
    assert first.id == duplicate.id != second.id


@pytest.mark.parametrize("whom", ["the children", "the worker"])
def test_a_worker_that_is_killed_leaves_no_mark(recorder: Recorder, whom: str) -> None:
    by_mode = tasks.by_mode.values()
    with workers(APP, concurrency=len(MODES)) as (worker,):
        first = [task.delay("k", 1, gate="never") for task in by_mode]
        runs = until(lambda: len(found := recorder.events("enter")) == len(MODES) and found, "they run")
        if whom == "the worker":
            worker.kill()
        else:
            for run in runs:
                kill_child(tasks.app, run)
            run_again(first)
            return
    with workers(APP):
        run_again(first)


def run_again(first: list[Any]) -> None:
    # Published at once, one of them would meet the lease of the dead.
    task = tasks.by_mode["until_and_while_executing"]
    until(lambda: not task.lock_holders("k"), "the key is free", timeout=SOON)
    for task, dead in zip(tasks.by_mode.values(), first, strict=True):
        assert new_call(task, "k", 2, but=[dead]).get(timeout=SOON) == 2
