"""`rerun` and `replace`: the call that was published last is the next run, and older ones end in its favour."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import VERSION as CELERY
from celery import Task
from celery.exceptions import TaskRevokedError

from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import one_worker
from tests.recorder import Recorder, numbers, of_key, overlaps
from tests.waiting import SOON, until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.combined_app"
valkey, worker = one_worker(6)


def test_the_retry_of_an_older_call_does_not_replace_a_newer_one(worker: Worker, recorder: Recorder) -> None:
    task, key = combined.retrying_replace, "older"
    older = task.delay(key, 1, countdown=4)
    until(lambda: older.state == "RETRY", "the older one waits for its retry")
    # It runs when that comes, and long enough after it to hear of a successor.
    newer = task.delay(key, 2, seconds=7)

    assert newer.get(timeout=2 * SOON) == 2
    older.get(timeout=SOON, propagate=False)
    assert overlaps(of_key(recorder, key)) == []


def test_a_replaced_run_with_automatic_retries_is_not_run_again(worker: Worker, recorder: Recorder) -> None:
    task, key = combined.replace_autoretrying, "autoretrying"
    first = recorder.begun(task.delay(key, 1, seconds=60))
    second = task.delay(key, 2)

    assert second.get(timeout=SOON) == 2
    with pytest.raises(TaskRevokedError, match=second.id):
        first.get(timeout=SOON)
    assert numbers(recorder, key) == [1, 2]


@contextmanager
def absent(worker: Worker) -> Iterator[None]:
    """Messages that this worker has to take, or has taken and keeps for later, do not come."""
    worker.send(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.send(signal.SIGCONT)


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_an_older_call_that_comes_after_the_newest_has_run_names_it(recorder: Recorder, policy: str) -> None:
    task, key = combined.by_policy[policy], f"after-the-newest-{policy}"
    with workers(APP, concurrency=2), workers(APP, {}, 1, "-Q", "away", concurrency=2) as (away,):
        holder = recorder.begun(task.delay(key, 1, seconds=0 if policy == "rerun" else 60, gate=key))
        older = met(away, recorder, task.apply_async((key, 2), queue="away"))
        with absent(away):
            newest = task.delay(key, 3)
            until(lambda: newest.state == "RETRY", "it has asked to be next")
            recorder.open_gate(key)
            assert newest.get(timeout=SOON) == 3
            until(lambda: not task.lock_holders(key), "nobody holds the key")

        with pytest.raises(TaskRevokedError, match=newest.id):
            older.get(timeout=SOON)
        holder.get(timeout=SOON, propagate=False)
        assert task.delay(key, 4).get(timeout=SOON) == 4

    assert numbers(recorder, key) == [1, 3, 4]


@pytest.mark.parametrize("how", ["redelivered", "retried"])
def test_a_successor_that_dies_is_run_again(worker: Worker, recorder: Recorder, how: str) -> None:
    if how == "retried" and not hasattr(Task, "retry_on_worker_lost"):
        pytest.skip("retry_on_worker_lost is new in Celery 5.7")
    task, key = combined.dying_rerun[how], f"dies-{how}"
    first = recorder.begun(task.delay(key, 1, gate=key))
    second = met(worker, recorder, task.delay(key, 2))
    third = met(worker, recorder, task.delay(key, 3, dies=True))
    with pytest.raises(TaskRevokedError, match=third.id):
        second.get(timeout=SOON)
    recorder.open_gate(key)

    assert first.get(timeout=SOON) == 1
    assert third.get(timeout=3 * SOON) == 3
    assert numbers(recorder, key) == [1, 3, 3]


def met(worker: Worker, recorder: Recorder, result: Any) -> Any:
    def runs() -> bool:
        return any(event.run == result.id for event in recorder.events("enter"))

    # A store that is slow to answer is told with the task id as well, but then the call has met nobody yet.
    met_it = f" task_id={result.id} holder="
    until(lambda: runs() or met_it in worker.log(), "it runs, or has met the one that runs")
    return result


@pytest.mark.parametrize("policy", combined.never_given_up)
def test_lock_wait_timeout_ends_no_successor(worker: Worker, recorder: Recorder, policy: str) -> None:
    task, key = combined.never_given_up[policy], f"never-given-up-{policy}"
    first = recorder.begun(task.delay(key, 1, gate=key))
    second = met(worker, recorder, task.delay(key, 2))
    (entered,) = of_key(recorder, key, "enter")
    over_at = entered.at + 4
    until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) > over_at, "it waits for longer than its lock_wait_timeout")
    assert second.state == "RETRY"
    recorder.open_gate(key)

    assert second.get(timeout=SOON) == 2
    assert first.get(timeout=SOON) == 1


@pytest.mark.skipif(
    CELERY < (5, 5), reason="a warm shutdown may leave what waits for its time in the worker to the visibility timeout"
)
@pytest.mark.parametrize("policy", ["skip", "reschedule", "replace"])
def test_the_newest_call_runs_though_its_task_has_another_policy_by_then(recorder: Recorder, policy: str) -> None:
    task, key = combined.moving, f"moving-{policy}"
    with workers(APP, {"TEST_MOVING": "rerun"}, 1, "-Q", key, concurrency=2) as (old,):
        first = recorder.begun(task.apply_async((key, 1), {"gate": key}, queue=key))
        second = task.apply_async((key, 2), queue=key)
        until(lambda: f"task_id={second.id} holder=" in old.log(), "the second one is next")
        third = task.apply_async((key, 3), queue=key)
        with pytest.raises(TaskRevokedError, match=third.id):
            second.get(timeout=SOON)
        # It ends what runs, and then gives the rest back.
        old.send(signal.SIGTERM)
        until(lambda: "Warm shutdown" in old.log(), "it takes nothing new")
        recorder.open_gate(key)

        with workers(APP, {"TEST_MOVING": policy}, 1, "-Q", key, concurrency=2):
            assert third.get(timeout=2 * SOON) == 3
    assert first.get(timeout=SOON) == 1
