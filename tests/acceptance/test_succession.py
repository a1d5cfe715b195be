"""`rerun` and `replace`: the newest call wins, and whatever was merged into another is carried by it."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Task, states, uuid
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockHeld
from tests.acceptance import combined_app as combined
from tests.gates import open_gate
from tests.recorder import Event, Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.combined_app"
PROMPTLY = 10


@pytest.fixture(scope="module")
def valkey(valkey_process: Server) -> Server:
    with valkey_process.client() as client:
        client.flushall()
    return valkey_process


@pytest.fixture(scope="module")
def env(valkey: Server) -> dict[str, str]:
    return {"TEST_STORE": valkey.url, "C_FORCE_ROOT": "1"}


@pytest.fixture(scope="module")
def worker(env: dict[str, str]) -> Iterator[Worker]:
    with workers(APP, env, 1, concurrency=6) as (worker,):
        yield worker


def of_key(recorder: Recorder, key: str, name: str | None = None) -> list[Event]:
    return [event for event in recorder.events(name) if event.key == key]


def running(recorder: Recorder, task: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    result = task.delay(key, *args, **kwargs)
    until(lambda: of_key(recorder, key, "enter"), "it runs")
    return result


def waits(worker: Worker, result: Any) -> None:
    """It has met the holder, or has ended of it."""
    until(lambda: f"task_id={result.id} holder=" in worker.log() or result.ready(), "it has met the holder")


def test_the_retry_of_an_older_call_does_not_replace_a_newer_one(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    task, key = combined.retrying_replace, "older"
    older = task.delay(key, 1, countdown=4)
    until(lambda: older.state == "RETRY", "the older one waits for its retry")
    # It runs when that comes, and long enough after it to hear of a successor.
    newer = task.delay(key, 2, seconds=7)

    assert newer.get(timeout=2 * PROMPTLY) == 2
    older.get(timeout=PROMPTLY, propagate=False)
    assert overlaps(of_key(recorder, key)) == []


def test_a_replaced_run_with_automatic_retries_does_not_come_again(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    task, key = combined.replace_autoretrying, "autoretrying"
    first = running(recorder, task, key, 1, seconds=30)
    second = task.delay(key, 2, seconds=2)

    assert second.get(timeout=PROMPTLY) == 2
    with pytest.raises(TaskRevokedError, match=second.id):
        first.get(timeout=PROMPTLY)
    assert [event.facts["number"] for event in of_key(recorder, key, "enter")] == [1, 2]


def test_a_run_names_its_successor_even_if_that_has_got_another_place(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    task, key = combined.cleans_up_one_of_two, "another-place"

    def runs(call: Any) -> Any:
        until(lambda: any(event.run == call.id for event in of_key(recorder, key, "enter")), "it runs")
        return call

    first = runs(task.delay(key, "never opened", "first has cleaned up"))
    second = runs(task.delay(key, "second ends"))
    successor = task.delay(key, "successor ends")
    until(lambda: of_key(recorder, key, "leave"), "the first has heard of its successor")
    open_gate(recorder, "second ends")
    runs(successor)
    open_gate(recorder, "first has cleaned up")

    with pytest.raises(TaskRevokedError, match=successor.id):
        first.get(timeout=PROMPTLY)
    open_gate(recorder, "successor ends")
    successor.get(timeout=PROMPTLY)
    second.get(timeout=PROMPTLY)


def test_a_successor_that_comes_late_carries_the_newest_arguments(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    task, key = combined.by_policy["rerun"], f"comes-late-{uuid()}"
    queue = key
    with workers(APP, env, 1, "-Q", queue, concurrency=2) as (worker,):
        first, second, third = (
            met(worker, recorder, task.apply_async((key, number), {"gate": key}, queue=queue)) for number in (1, 2, 3)
        )
        until(lambda: third.state == states.REVOKED, "the second runs in place of the third")
        os.kill(worker.pid, signal.SIGSTOP)
        # The pool child goes on by itself.
        open_gate(recorder, key)
        until(lambda: of_key(recorder, key, "leave"), "the first has left")
        (left,) = of_key(recorder, key, "leave")
        # Nobody knows how late a message may come; a worker that is busy keeps it for longer than this.
        until(lambda: since(left) > 33, "the successor is late", timeout=40)
        os.kill(worker.pid, signal.SIGCONT)

        assert first.get(timeout=PROMPTLY) == 1
        assert second.get(timeout=PROMPTLY) == 3
        with pytest.raises(TaskRevokedError, match=second.id):
            third.get(timeout=PROMPTLY)

    assert [event.facts["number"] for event in of_key(recorder, key, "enter")] == [1, 3]


@pytest.mark.parametrize("how", ["redelivered", "retried"])
def test_a_run_that_dies_with_merged_arguments_comes_again_with_them(
    tasks: Any, worker: Worker, recorder: Recorder, how: str
) -> None:
    if how == "retried" and not hasattr(Task, "retry_on_worker_lost"):
        pytest.skip("retry_on_worker_lost is new in Celery 5.7")
    task, key = combined.dying_rerun[how], f"dies-{how}"
    first = running(recorder, task, key, 1, gate=key)
    second = met(worker, recorder, task.delay(key, 2))
    third = met(worker, recorder, task.delay(key, 3, dies=True))
    open_gate(recorder, key)

    assert first.get(timeout=PROMPTLY) == 1
    assert second.get(timeout=3 * PROMPTLY) == 3
    with pytest.raises(TaskRevokedError, match=second.id):
        third.get(timeout=PROMPTLY)
    assert [event.facts["number"] for event in of_key(recorder, key, "enter")] == [1, 3, 3]


def met(worker: Worker, recorder: Recorder, result: Any) -> Any:
    """It runs or waits."""

    def runs() -> bool:
        return any(event.run == result.id for event in recorder.events("enter"))

    # A store that is slow to answer is told with the task id as well, but then the call has met nobody yet.
    met_it = f" task_id={result.id} holder="
    until(lambda: runs() or met_it in worker.log(), "it runs, or has met the one that runs")
    return result


def since(event: Event) -> float:
    """Seconds on the clock of the record."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - event.at


def test_a_successor_that_others_were_merged_into_does_not_give_up(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    task = combined.impatient_rerun
    for attempt in range(3):
        key = f"merged-{attempt}"
        # Thrice the time for which a call of this task waits.
        first = running(recorder, task, key, 1, seconds=3)
        second = task.delay(key, 2)
        waits(worker, second)
        third = task.delay(key, 3)
        until(third.ready, "the third has ended")
        # A machine that is paused may bring it when the second has given up already.
        if third.state == states.REVOKED:
            break

    assert second.get(timeout=PROMPTLY) == 3
    assert first.get(timeout=PROMPTLY) == 1
    with pytest.raises(TaskRevokedError, match=second.id):
        third.get(timeout=PROMPTLY)
    assert [event.facts["number"] for event in of_key(recorder, key, "enter")] == [1, 3]


def test_a_successor_that_nobody_was_merged_into_gives_up_in_time(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    task, key = combined.impatient_rerun, "alone"
    first = running(recorder, task, key, 1, gate=key)

    with pytest.raises(LockHeld, match=first.id):
        task.delay(key, 2).get(timeout=PROMPTLY)
    open_gate(recorder, key)
    assert first.get(timeout=PROMPTLY) == 1


@pytest.mark.parametrize("policy", ["reschedule", "rerun", "replace", "join"])
def test_a_message_comes_again_in_the_serialiser_it_came_in(
    tasks: Any, worker: Worker, recorder: Recorder, policy: str
) -> None:
    task, key = combined.by_policy[policy], f"pickled-{policy}"
    seconds = 20 if policy == "replace" else 0
    first = running(recorder, task, key, 1, seconds=seconds, gate=None if seconds else key)
    # JSON knows no complex numbers.
    second = task.apply_async((key, 2), {"only_pickle": 1j}, serializer="pickle")
    waits(worker, second)
    open_gate(recorder, key)

    assert second.get(timeout=PROMPTLY) == (1 if policy == "join" else 2)
    assert first.get(timeout=PROMPTLY, propagate=False) is not None


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_a_call_in_a_serialiser_of_its_own_runs_where_nobody_is_in_its_way(
    tasks: Any, worker: Worker, policy: str
) -> None:
    call = combined.by_policy[policy].apply_async((f"free-{policy}", 2), {"only_pickle": 1j}, serializer="pickle")

    assert call.get(timeout=PROMPTLY) == 2


@pytest.mark.parametrize(("mode", "policy"), combined.succeeding)
def test_of_a_queued_call_and_a_newer_one_the_newer_runs_and_the_other_does_not(
    tasks: Any, worker: Worker, recorder: Recorder, mode: str, policy: str
) -> None:
    task, key = combined.succeeding[mode, policy], f"queued-{mode}-{policy}"
    queued = task.apply_async((key, 1), countdown=3)
    # With an id of its own it is sent, though another one is queued.
    newer = task.apply_async((key, 2), task_id=uuid())

    assert newer.get(timeout=PROMPTLY) == 2
    with pytest.raises(TaskRevokedError, match=newer.id):
        queued.get(timeout=PROMPTLY)
    assert [event.facts["number"] for event in of_key(recorder, key, "enter")] == [2]


def test_a_successor_for_which_a_run_was_cancelled_does_not_give_up(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    task, key = combined.cleans_up, "cleans-up"
    first = running(recorder, task, key, 1, seconds=60, gate=key)
    second = task.delay(key, 2)
    until(lambda: len(of_key(recorder, key, "enter")) == 2, "the first one cleans up")
    (_, cleans_up) = of_key(recorder, key, "enter")
    until(lambda: since(cleans_up) > 4, "the second one has waited for longer than it may")
    open_gate(recorder, key)

    assert second.get(timeout=PROMPTLY) == 2
    with pytest.raises(TaskRevokedError, match=second.id):
        first.get(timeout=PROMPTLY)
