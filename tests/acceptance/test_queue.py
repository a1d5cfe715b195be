"""Unique in the queue: the same call is not published twice, and no mark of it is left behind."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from celery import chain, chord, group
from kombu.exceptions import OperationalError

from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP, new_call
from tests.recorder import Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

PROMPTLY = 30
MODES = ("until_executing", "until_executed", "until_and_while_executing")

PUBLISH = """
import sys
from tests.acceptance.app import by_mode
for _ in range(50):
    print(by_mode[sys.argv[1]].delay("k").id)
"""

every_mode = pytest.mark.parametrize(
    "mode", [mode if mode == "until_executed" else pytest.param(mode, marks=pytest.mark.prove) for mode in MODES]
)


@every_mode
def test_of_many_publishers_one_message_comes_and_all_have_its_id(
    valkey: Server, recorder: Recorder, mode: str
) -> None:
    command = [sys.executable, "-c", PUBLISH, mode]
    publishers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    ids = {line for publisher in publishers for line in publisher.communicate()[0].split()}

    assert len(ids) == 1
    with valkey.client() as client:
        assert client.llen("celery") == 1
    with workers(APP):
        assert tasks.app.AsyncResult(ids.pop()).get(timeout=40) == 0
        again = tasks.by_mode[mode].delay("k", 1)
        assert again.get(timeout=PROMPTLY) == 1
    assert len(recorder.events("enter")) == 2


def test_what_counts_while_it_runs(recorder: Recorder) -> None:
    with workers(APP, concurrency=4):
        first = {mode: tasks.by_mode[mode].delay(mode, 1, gate="they end") for mode in MODES}
        until(lambda: len(recorder.events("enter")) == 3, "they run")
        second = {mode: tasks.by_mode[mode].delay(mode, 2) for mode in MODES}

        assert second["until_executed"].id == first["until_executed"].id
        assert second["until_executing"].get(timeout=PROMPTLY) == 2
        assert second["until_and_while_executing"].id != first["until_and_while_executing"].id
        second["until_and_while_executing"].get(timeout=PROMPTLY, propagate=False)
        recorder.open_gate("they end")
        assert [first[mode].get(timeout=PROMPTLY) for mode in MODES] == [1, 1, 1]
    assert len(overlaps(recorder.events())) == 1


def test_a_body_of_until_executing_runs_without_a_lock_and_its_call_is_queued_no_more(
    recorder: Recorder, valkey: Server
) -> None:
    task = tasks.by_mode["until_executing"]
    with workers(APP, concurrency=2), valkey.client(database=2) as locks:
        first = task.delay("k", 1, gate="they end")
        (entered,) = until(lambda: recorder.events("enter"), "it runs")
        assert (entered.facts["held"], entered.facts["fence"]) == (False, 0)
        assert not locks.exists(task.lock_key_for("k"))
        assert task.lock_holders("k") == []

        assert task.delay("k", 2).get(timeout=PROMPTLY) == 2
        recorder.open_gate("they end")
        assert first.get(timeout=PROMPTLY) == 1


@every_mode
def test_a_call_that_could_not_be_published_leaves_no_mark(valkey: Server, mode: str) -> None:
    task, url = tasks.by_mode[mode], tasks.app.conf.broker_url
    tasks.app.conf.broker_url = "redis://127.0.0.1:1/0"
    tasks.app.amqp._producer_pool = None
    with pytest.raises(OperationalError):
        task.apply_async(("k",), retry=False)
    tasks.app.conf.broker_url = url
    tasks.app.amqp._producer_pool = None

    assert task.delay("k").id == task.delay("k").id == only_message(valkey)


def only_message(valkey: Server) -> str:
    with valkey.client() as broker:
        (message,) = broker.lrange("celery", 0, -1)
    return str(json.loads(message)["headers"]["id"])


@every_mode
@pytest.mark.parametrize("end", ["expired", "revoked"])
def test_a_call_that_will_never_run_is_queued_no_more(mode: str, end: str) -> None:
    task = tasks.by_mode[mode]
    expired = task.apply_async(("k",), expires=0.1) if end == "expired" else None
    with workers(APP):
        first = expired or revoked(task)
        until(lambda: first.state == "REVOKED", "it is revoked")

        until(lambda: task.delay("k", 1).id != first.id, "another is published")


def test_a_call_that_the_broker_throws_away_unread_is_queued_no_more(tasks_by_broker: Any) -> None:
    task = tasks_by_broker.by_mode["until_executed"]
    first = task.apply_async(("k",), expires=2)

    assert task.delay("k").id == first.id
    until(lambda: task.delay("k").id != first.id, "another is published", timeout=PROMPTLY)


def test_a_call_that_is_requeued_counts_as_queued_until_it_expires(recorder: Recorder) -> None:
    task = tasks.rescheduled_in_queue
    with workers(APP) as (worker,):
        task.delay("k", 1, gate="never")
        until(lambda: recorder.events("enter"), "it runs")
        second = task.apply_async(("k", 2), expires=5)
        until(lambda: f"task_id={second.id} holder" in worker.log(), "it was refused, and is requeued")
        worker.kill()

    until(lambda: task.delay("k", 3).id != second.id, "another is published", timeout=PROMPTLY)


def test_a_result_of_an_earlier_call_with_its_task_id_says_nothing_of_a_queued_call() -> None:
    task = tasks.by_mode["until_executed"]
    with workers(APP):
        assert task.apply_async(("k", 1), task_id="nightly").get(timeout=PROMPTLY) == 1
        tonight = task.apply_async(("k", 2), task_id="nightly", countdown=600)

        assert task.delay("k", 3).id == "nightly"
        tonight.revoke()
        assert new_call(task, "k", 4, but=[tonight]).get(timeout=PROMPTLY) == 4


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
        body.get(timeout=PROMPTLY, propagate=False)
        assert body.result.reason == "skipped"
        assert first.get(timeout=PROMPTLY) == 1


def test_a_call_that_is_revoked_while_the_worker_is_busy_can_be_submitted_again_at_once(recorder: Recorder) -> None:
    task = tasks.by_mode["until_executed"]
    with workers(APP, concurrency=1):
        tasks.by_policy["skip"].delay("another", gate="it ends")
        until(lambda: recorder.events("enter"), "the worker is busy")
        first = task.delay("k", 1)
        duplicate = task.delay("k", 1)
        duplicate.revoke()
        second = task.delay("k", 2)
        recorder.open_gate("it ends")

        assert second.get(timeout=PROMPTLY) == 2
    assert first.id == duplicate.id != second.id


def revoked(task: Any) -> Any:
    # A worker says that it is ready a moment before it hears of revocations.
    until(task.app.control.ping, "the worker listens")
    result = task.apply_async(("k",), countdown=6)
    result.revoke()
    return result


@every_mode
@pytest.mark.parametrize("whom", ["the child", "the worker"])
def test_a_worker_that_is_killed_leaves_no_mark(recorder: Recorder, mode: str, whom: str) -> None:
    task = tasks.by_mode[mode]
    with workers(APP) as (worker,):
        first = task.delay("k", 1, 30)
        pid = until(lambda: recorder.events("enter"), "it runs")[0].pid
        if whom == "the child":
            os.kill(pid, signal.SIGKILL)
        else:
            worker.kill()
    if mode == "until_and_while_executing":
        # Published at once, it would meet the lease of the dead.
        until(lambda: not task.lock_holders("k"), "the key is free", timeout=40)
    with workers(APP):
        following = new_call(task, "k", 2, but=[first])
        assert following.get(timeout=40) == 2


@every_mode
def test_a_retry_does_not_meet_its_own_mark(recorder: Recorder, mode: str) -> None:
    with workers(APP, {}, 2):
        assert tasks.retrying_by_mode[mode].delay("k", attempts=2).get(timeout=40) == 2

    assert len(recorder.events("enter")) == 3


@every_mode
def test_a_canvas_with_equal_members_ends(recorder: Recorder, mode: str) -> None:
    task = tasks.by_mode[mode]
    with workers(APP, concurrency=4):
        members = group(task.s("g", 0, 0.5), task.s("g", 0, 0.5)).delay()
        steps = chain(task.si("c"), task.si("c"), task.si("c", 3)).delay()
        header = chord([task.s("h", 0, 0.5), task.s("h", 0, 0.5), task.s("free")])(tasks.collect.s())

        assert steps.get(timeout=PROMPTLY) == 3
        assert set(header.get(timeout=PROMPTLY)) <= {0, None}
        members.get(timeout=PROMPTLY, propagate=False)
