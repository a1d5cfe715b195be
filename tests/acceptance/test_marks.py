"""The mark of a call belongs to its message, and ends with it."""

import json
import os
import signal

import pytest
from celery import Task, chain, chord, group
from celery.exceptions import NotRegistered
from kombu import serialization

from celery_singleton_lock import SingletonTask
from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import new_call, one_worker
from tests.recorder import Recorder, of_key, overlaps
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import Worker, workers

APP = "tests.acceptance.combined_app"
valkey, worker = one_worker(8)


@pytest.mark.parametrize("policy", combined.unique)
def test_a_call_that_ended_without_a_run_is_queued_no_more(worker: Worker, recorder: Recorder, policy: str) -> None:
    task, key = combined.unique[policy], f"without-a-run-{policy}"
    first = recorder.begun(task.delay(key, 1, gate=key))

    second = task.delay(key, 2)
    second.get(timeout=SOON, propagate=False)
    recorder.open_gate(key)
    first.get(timeout=SOON)

    assert second.id != first.id
    assert new_call(task, key, 3, but=[first, second]).get(timeout=SOON) == 3


def test_a_call_that_fails_before_its_body_starts_is_queued_no_more(worker: Worker) -> None:
    first = combined.stumbling.delay("stumbles", stumbles=True)
    with pytest.raises(ValueError, match="it stumbles"):
        first.get(timeout=SOON)

    assert new_call(combined.stumbling, "stumbles", 3, but=[first]).get(timeout=SOON) == 3


@pytest.mark.parametrize("mode", combined.waiting_by_mode)
def test_a_call_of_a_task_that_the_worker_does_not_know_is_queued_no_more(worker: Worker, mode: str) -> None:
    @tasks.app.task(base=SingletonTask, name=f"known-here-only-{mode}", lock_mode=mode)
    def unknown(key: str, number: int = 0) -> None: ...

    first = unknown.delay("unknown", 3)
    with pytest.raises(NotRegistered):
        first.get(timeout=SOON)

    assert new_call(unknown, "unknown", 3, but=[first])
    tasks.app.tasks.unregister(unknown.name)


@pytest.mark.parametrize("mode", combined.waiting_by_mode)
def test_a_call_in_a_serialiser_that_the_worker_refuses_is_queued_no_more(worker: Worker, mode: str) -> None:
    serialization.register("ours-alone", json.dumps, json.loads, "application/x-ours-alone", "utf-8")
    task = combined.waiting_by_mode[mode]
    first = task.apply_async(("refused", 1), serializer="ours-alone")

    assert new_call(task, "refused", 3, but=[first]).get(timeout=SOON) == 3
    serialization.unregister("ours-alone")


@pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="retry_on_worker_lost is new in Celery 5.7")
def test_a_duplicate_of_a_call_that_waits_for_the_retry_of_a_lost_child_is_not_published(
    worker: Worker, recorder: Recorder
) -> None:
    first = combined.dying.delay("lost-child", 1, 30)
    os.kill(until(lambda: of_key(recorder, "lost-child", "enter"), "it runs")[0].pid, signal.SIGKILL)
    until(lambda: first.state == "RETRY", "it waits for its retry", timeout=40)

    assert combined.dying.delay("lost-child", 2).id == first.id
    first.revoke(terminate=True, signal="SIGKILL")


def test_what_counts_while_it_runs(worker: Worker, recorder: Recorder, valkey: Server) -> None:
    key = "what counts"
    first = {mode: task.delay(key, mode, gate=key) for mode, task in tasks.by_mode.items()}
    entered = until(lambda: len(found := of_key(recorder, key, "enter")) == 3 and found, "they run")
    (unlocked,) = [event for event in entered if event.facts["number"] == "until_executing"]
    assert (unlocked.facts["held"], unlocked.facts["fence"]) == (False, 0)
    with valkey.client(database=2) as locks:
        assert not locks.exists(tasks.by_mode["until_executing"].lock_key_for(key))
    assert tasks.by_mode["until_executing"].lock_holders(key) == []

    second = {mode: task.delay(key, 2) for mode, task in tasks.by_mode.items()}
    assert second["until_executed"].id == first["until_executed"].id
    assert second["until_executing"].get(timeout=SOON) == 2
    assert second["until_and_while_executing"].id != first["until_and_while_executing"].id
    second["until_and_while_executing"].get(timeout=SOON, propagate=False)
    recorder.open_gate(key)
    assert {mode: result.get(timeout=SOON) for mode, result in first.items()} == {mode: mode for mode in tasks.MODES}
    assert len(of_key(recorder, key, "enter")) == 4


def test_a_result_of_an_earlier_call_with_its_task_id_says_nothing_of_a_queued_call(worker: Worker) -> None:
    task, key = tasks.by_mode["until_executed"], "nightly"
    assert task.apply_async((key, 1), task_id="nightly").get(timeout=SOON) == 1
    tonight = task.apply_async((key, 2), task_id="nightly", countdown=600)

    assert task.delay(key, 3).id == "nightly"
    tonight.revoke()
    assert new_call(task, key, 4, but=[tonight]).get(timeout=SOON) == 4


def test_a_retry_waits_for_its_body_and_does_not_meet_its_own_mark(worker: Worker, recorder: Recorder) -> None:
    by_mode = {"while_executing": tasks.retrying, **tasks.retrying_by_mode}
    # As many processes are idle, and take the retries while the bodies still end.
    retried = [task.delay(mode, attempts=2, finish=0.5) for mode, task in by_mode.items()]

    assert [result.get(timeout=SOON) for result in retried] == [2] * len(by_mode)
    events = {mode: of_key(recorder, mode) for mode in by_mode}
    assert [sum(event.name == "enter" for event in found) for found in events.values()] == [3] * len(by_mode)
    assert [mode for mode, found in events.items() if overlaps(found)] in ([], ["until_executing"])


@pytest.mark.parametrize("mode", tasks.MODES)
def test_a_canvas_with_equal_members_ends(worker: Worker, mode: str) -> None:
    task, key = tasks.by_mode[mode], f"equal-{mode}"
    members = group(task.s(key, 0, 0.5), task.s(key, 0, 0.5)).delay()
    steps = chain(task.si(f"{key} step"), task.si(f"{key} step"), task.si(f"{key} step", 3)).delay()
    equal = [task.s(f"{key} member", 0, 0.5) for _ in range(2)]
    header = chord([*equal, task.s(f"{key} free")])(tasks.collect.s())

    assert steps.get(timeout=SOON) == 3
    assert set(header.get(timeout=SOON)) <= {0, None}
    members.get(timeout=SOON, propagate=False)


@pytest.mark.parametrize("mode", combined.waiting_by_mode)
def test_a_run_in_the_only_slot_does_not_wait_for_a_queued_call(valkey: Server, recorder: Recorder, mode: str) -> None:
    task, key, queue = combined.waiting_by_mode[mode], f"one-slot-{mode}", f"one-slot-{mode}"
    # Sent by its name, as another service does, it is not marked as queued.
    first = tasks.app.send_task(task.name, (key, 1), queue=queue)
    second = task.apply_async((key, 2), queue=queue)
    with workers(APP, {"TEST_STORE": valkey.url}, 1, "-Q", queue, concurrency=1):
        assert first.get(timeout=SOON) == 1
        assert second.get(timeout=SOON) == 2


def test_a_later_step_of_what_replaces_a_task_waits_for_a_queued_call_and_asks_nobody_meanwhile(
    worker: Worker, recorder: Recorder
) -> None:
    task, key = tasks.rescheduled_in_queue, "a-later-step"
    queued = task.apply_async((key, 1), queue="of nobody")
    step = combined.replaced_by.delay(chain(combined.plain.si(), task.si(key, 2)))
    until(lambda: task.lock_state(key).turns, "the step waits")
    came = worker.log().count(f"[{step.id}] received")

    assert task.delay("another key", 3, 2.0).get(timeout=SOON) == 3
    assert worker.log().count(f"[{step.id}] received") <= came + 2
    queued.revoke()
    assert step.get(timeout=SOON) == 2
