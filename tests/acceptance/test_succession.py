"""`rerun` and `replace`: the call that was published last is the next run, and older ones end in its favour."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from celery import Task
from celery.exceptions import TaskRevokedError

from celery_singleton_lock.settings import store_of
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


@contextmanager
def two_workers(env: dict[str, str]) -> Iterator[tuple[Worker, Worker]]:
    """One for the queue `celery`, and one for the queue `away`."""
    with ExitStack() as stack:
        at_hand, away = Worker(APP, env, concurrency=2), Worker(APP, env, "-Q", "away", concurrency=2)
        for each in (at_hand, away):
            stack.callback(each.close)
            each.start()
        for each in (at_hand, away):
            each.ready()
        yield at_hand, away


@contextmanager
def absent(worker: Worker) -> Iterator[None]:
    """Messages that this worker has to take, or has taken and keeps for later, do not come."""
    worker.send(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.send(signal.SIGCONT)


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_of_three_calls_with_other_arguments_the_newest_runs_next_and_each_older_one_names_a_newer_one(
    tasks: Any, worker: Worker, recorder: Recorder, policy: str
) -> None:
    # The one that is replaced cleans up until its gate opens.
    task, seconds = (combined.by_policy["rerun"], 0) if policy == "rerun" else (combined.cleans_up, 60)
    key = f"three-{policy}"
    holder = running(recorder, task, key, 1, seconds=seconds, gate=key)
    second = met(worker, recorder, task.delay(key, 2))
    third = met(worker, recorder, task.delay(key, 3))
    newest = task.delay(key, 4)

    with pytest.raises(TaskRevokedError, match=f"{third.id}|{newest.id}"):
        second.get(timeout=PROMPTLY)
    with pytest.raises(TaskRevokedError, match=newest.id):
        third.get(timeout=PROMPTLY)
    assert (third.result.holder_task_id, third.result.reason) == (newest.id, "superseded")
    open_gate(recorder, key)
    assert newest.get(timeout=PROMPTLY) == 4
    holder.get(timeout=PROMPTLY, propagate=False)
    # A run that cleans up has a negative number meanwhile.
    assert [event.facts["number"] for event in of_key(recorder, key, "enter") if event.facts["number"] > 0] == [1, 4]
    assert overlaps([event for event in of_key(recorder, key) if event.facts.get("number", 1) > 0]) == []


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_an_older_call_that_comes_again_after_the_newest_has_run_ends_and_names_it(
    tasks: Any, env: dict[str, str], recorder: Recorder, policy: str
) -> None:
    task, key = combined.by_policy[policy], f"after-the-newest-{policy}"
    with two_workers(env) as (_, away):
        holder = running(recorder, task, key, 1, seconds=0 if policy == "rerun" else 60, gate=key)
        older = met(away, recorder, task.apply_async((key, 2), queue="away"))
        with absent(away):
            newest = task.delay(key, 3)
            until(lambda: newest.state == "RETRY", "it has asked to be next")
            open_gate(recorder, key)
            assert newest.get(timeout=PROMPTLY) == 3
            until(lambda: not task.lock_holders(key), "nobody holds the key")

        with pytest.raises(TaskRevokedError, match=newest.id):
            older.get(timeout=PROMPTLY)
        holder.get(timeout=PROMPTLY, propagate=False)
        # A new call has nothing to do with all that.
        assert task.delay(key, 4).get(timeout=PROMPTLY) == 4

    assert [event.facts["number"] for event in of_key(recorder, key, "enter")] == [1, 3, 4]


def test_an_older_call_runs_if_the_newer_one_is_revoked_before_the_older_has_heard_of_it(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    task, key = combined.by_policy["rerun"], "revoked-successor"
    with two_workers(env) as (_, away):
        holder = running(recorder, task, key, 1, gate=key)
        older = met(away, recorder, task.apply_async((key, 2), queue="away"))
        with absent(away):
            newer = task.delay(key, 3)
            until(lambda: newer.state == "RETRY", "it has asked to be next")
            newer.revoke()
            until(lambda: newer.state == "REVOKED", "it is revoked")
            until(lambda: not is_next(key, newer), "its mark has ended")
        open_gate(recorder, key)

        assert older.get(timeout=PROMPTLY) == 2
        assert holder.get(timeout=PROMPTLY) == 1


def is_next(key: str, call: Any) -> bool:
    task = combined.by_policy["rerun"]
    (survey,) = store_of(combined.app).survey([task.lock_key_for(key)])
    return any(mark.task_id == call.id for mark in survey.marks)


def test_a_successor_whose_message_is_lost_is_in_nobodys_way_for_longer_than_half_a_minute(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    succeeding, beside, key = combined.beside_the_next["rerun"], combined.beside_the_next["reschedule"], "lost"
    with two_workers(env) as (worker, away):
        holder = running(recorder, succeeding, key, 1, gate=key)
        lost = met(away, recorder, succeeding.apply_async((key, 2), queue="away"))
        away.kill()
        with valkey.client() as broker:
            broker.delete("away", "unacked", "unacked_index")
        other = met(worker, recorder, beside.delay(key, 3))
        open_gate(recorder, key)
        assert holder.get(timeout=PROMPTLY) == 1
        freed = time.monotonic()

        assert other.get(timeout=40) == 3
        assert time.monotonic() - freed < 33
        # Celery's line, because ours for a call that comes again are DEBUG.
        again = [line for line in worker.log().splitlines() if f"[{other.id}] retry:" in line]
        assert any(lost.id in line for line in again)


def test_a_newer_call_does_not_wait_for_a_successor_whose_message_is_lost(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    task, key = combined.by_policy["rerun"], "lost-and-superseded"
    with two_workers(env) as (_, away):
        holder = running(recorder, task, key, 1, gate=key)
        met(away, recorder, task.apply_async((key, 2), queue="away"))
        away.kill()
        with valkey.client() as broker:
            broker.delete("away")
        open_gate(recorder, key)
        assert holder.get(timeout=PROMPTLY) == 1

        assert task.delay(key, 3).get(timeout=PROMPTLY) == 3


@pytest.mark.parametrize("how", ["redelivered", "retried"])
def test_a_successor_that_dies_comes_again(tasks: Any, worker: Worker, recorder: Recorder, how: str) -> None:
    if how == "retried" and not hasattr(Task, "retry_on_worker_lost"):
        pytest.skip("retry_on_worker_lost is new in Celery 5.7")
    task, key = combined.dying_rerun[how], f"dies-{how}"
    first = running(recorder, task, key, 1, gate=key)
    second = met(worker, recorder, task.delay(key, 2))
    third = met(worker, recorder, task.delay(key, 3, dies=True))
    with pytest.raises(TaskRevokedError, match=third.id):
        second.get(timeout=PROMPTLY)
    open_gate(recorder, key)

    assert first.get(timeout=PROMPTLY) == 1
    assert third.get(timeout=3 * PROMPTLY) == 3
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


@pytest.mark.parametrize("policy", combined.never_given_up)
def test_lock_wait_timeout_ends_no_successor(tasks: Any, worker: Worker, recorder: Recorder, policy: str) -> None:
    task, key = combined.never_given_up[policy], f"never-given-up-{policy}"
    first = running(recorder, task, key, 1, gate=key)
    second = met(worker, recorder, task.delay(key, 2))
    (entered,) = of_key(recorder, key, "enter")
    until(lambda: since(entered) > 4, "it has waited for longer than its lock_wait_timeout")
    assert second.state == "RETRY"
    open_gate(recorder, key)

    assert second.get(timeout=PROMPTLY) == 2
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
