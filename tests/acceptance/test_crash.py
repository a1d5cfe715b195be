"""P2 and P4, nothing stuck and you are told: workers that die, stop, hold the GIL, or lose a lease or their store."""

import os
import signal
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY

import pytest
from celery import VERSION
from celery.apps import worker
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from celery_singleton_lock import LockLost, StoreError
from celery_singleton_lock.stores.records import LockState
from tests.acceptance import app as tasks
from tests.acceptance import children_app as children
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import APP, new_call
from tests.recorder import Event, Recorder, of_key
from tests.servers import running
from tests.waiting import SOON, until
from tests.workers import is_alive, kill_child, workers

TTL = 3.0
COMBINED = "tests.acceptance.combined_app"


def test_after_a_worker_is_killed_in_the_midst_of_a_run_the_next_call_runs_within_the_ttl(recorder: Recorder) -> None:
    with workers(APP, {"TEST_TTL": str(TTL)}, 2) as pair:
        tasks.rescheduled.delay("k", 1, seconds=60)
        first = until(lambda: recorder.events("enter"), "the first run has begun")[0]
        victim = next(worker for worker in pair if os.getpgid(first.pid) == worker.pid)
        victim.kill()
        killed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert tasks.rescheduled.delay("k", 2).get(timeout=40) == 2

    second = recorder.events("enter")[1]
    # One ttl for the key to come free, the longest delay of a rescheduled call to notice, and a machine's pauses.
    assert second.at - killed_at < TTL + 2.0 + 10.0
    assert second.facts["took_over"]
    assert second.facts["fence"] > first.facts["fence"]


@pytest.mark.skipif(not hasattr(worker, "on_cold_shutdown"), reason="Celery 5.4 tells nobody of what it cuts off")
def test_a_run_that_a_shutdown_cuts_off_has_no_result_of_an_earlier_call_with_its_id(recorder: Recorder) -> None:
    task = tasks.by_policy["skip"]
    with workers(APP) as (its_worker,):
        # Some backends never overwrite a success.
        task.apply_async(("k", 1), {"fails": True}, task_id="nightly").get(timeout=20, propagate=False)
        task.apply_async(("k", 2), {"gate": "never"}, task_id="nightly")
        until(lambda: len(recorder.events("enter")) == 2, "it runs again")
        # Celery cuts off only a run that the main process knows of, and waits for the body of any other.
        until(lambda: any((tasks.app.control.inspect().active() or {}).values()), "its worker knows of it")
        its_worker.send(signal.SIGQUIT)
        its_worker.wait()

    assert task.AsyncResult("nightly").state == "RETRY"


def test_a_release_after_expiry_leaves_the_successors_lock_alone(recorder: Recorder) -> None:
    with workers(APP, {"TEST_TTL": "6"}, 2) as pair:
        paused = tasks.aborted.delay("k", 60)
        first = until(lambda: recorder.events("enter"), "the first run has begun")[0]
        os.kill(first.pid, signal.SIGSTOP)
        until(lambda: not tasks.aborted.lock_holders("k", 60), "the lease of the stopped run has expired")
        successor = tasks.aborted.delay("k", 60)
        until(lambda: len(recorder.events("enter")) == 2, "the successor runs")
        told = [line for each in pair for line in each.log().splitlines() if "lock.holder_died" in line]
        assert [f"task_id={paused.id}" in line and "its lease ran out" in line for line in told] == [True]
        os.kill(first.pid, signal.SIGCONT)

        with pytest.raises(LockLost):
            paused.get(timeout=30)
        holders = tasks.aborted.lock_holders("k", 60)
        assert [holder.task_id for holder in holders] == [successor.id]


def kill(task_app: Any, run: Event, result: Any) -> None:
    kill_child(task_app, run)


def terminate(task_app: Any, run: Event, result: Any) -> None:
    task_app.control.revoke(result.id, terminate=True, signal="SIGKILL")


def wait_for_the_limit(task_app: Any, run: Event, result: Any) -> None:
    """It has a hard time limit. A stopped process cannot end in order at the SIGTERM that comes before the SIGKILL."""
    os.kill(run.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    "end", [kill, *[pytest.param(end, marks=pytest.mark.prove) for end in (terminate, wait_for_the_limit)]]
)
def test_a_run_whose_process_is_killed_leaves_its_cool_down_as_any_other(recorder: Recorder, end: Any) -> None:
    limit = {"time_limit": 2} if end is wait_for_the_limit else {}
    number = len(combined.cooling)
    with workers(COMBINED, {"TEST_TTL": "30"}, concurrency=number) as (its_worker,):
        for task in combined.cooling.values():
            result = task.apply_async(("k", 1), {"gate": "never"}, **limit)
            recorder.begun(result)
            (run,) = [event for event in recorder.events("enter") if event.run == result.id]
            end(tasks.app, run, result)
        if end is kill:
            told = "its pool process died while it held the lock"
            until(lambda: its_worker.log().count(told) == number, "their deaths are told", timeout=30)

        for (_, after_failure), task in combined.cooling.items():
            if after_failure:
                # The main process releases once the child is dead.
                until(lambda task=task: not task.lock_state("k").holders, "its lease is given back")
                until(lambda task=task: task.lock_state("k").queued is None, "its mark has ended")
                left = task.lock_state("k").cooldown_until - datetime.now(UTC)
                assert timedelta(seconds=20) < left < timedelta(seconds=60)
            else:
                nothing = LockState(task.lock_key_for("k"), at=ANY)
                until(lambda task=task, nothing=nothing: task.lock_state("k") == nothing, "nothing is left")


def test_a_call_that_was_terminated_stands_for_no_other_though_its_child_is_not_dead_yet(recorder: Recorder) -> None:
    task = combined.stumbling
    with workers(COMBINED, {"TEST_TTL": "60"}, concurrency=2):
        first = task.delay("k", 1, gate="never")
        run = until(lambda: recorder.events("enter"), "it runs")[0]
        os.kill(run.pid, signal.SIGSTOP)
        tasks.app.control.revoke(first.id, terminate=True)
        with pytest.raises(TaskRevokedError):
            first.get(timeout=40)
        first.forget()

        second = new_call(task, "k", 2, but=[first])
        until(lambda: second.state == "RETRY", "it waits for the end of the child", timeout=40)
        assert [each.task_id for each in task.lock_holders("k")] == [first.id]
        os.kill(run.pid, signal.SIGCONT)
        assert second.get(timeout=40) == 2


@pytest.mark.skipif(VERSION < (5, 7), reason="before Celery 5.7, no hook is called at a hard time limit")
def test_a_call_that_reached_its_time_limit_stands_for_no_other_while_its_hook_runs(recorder: Recorder) -> None:
    task = combined.reporting
    with workers(COMBINED, {"TEST_TTL": "60"}, concurrency=2):
        first = task.apply_async(("k", 1), {"gate": "never"}, time_limit=1)
        with pytest.raises(TimeLimitExceeded):
            first.get(timeout=40)
        first.forget()

        second = new_call(task, "k", 2, but=[first])
        recorder.open_gate("it is reported")
        assert second.get(timeout=40) == 2


def test_the_key_of_a_killed_child_is_free_and_the_request_class_of_the_user_is_told(recorder: Recorder) -> None:
    with workers(COMBINED, {"TEST_TTL": "60"}, concurrency=len(combined.told)):
        for name, task in combined.told.items():
            task.delay(name, gate="never")
        begun = until(lambda: len(found := recorder.events("enter")) == len(combined.told) and found, "all run")
        for event in begun:
            kill_child(tasks.app, event)

        for name, task in combined.told.items():
            until(lambda task=task, name=name: not task.lock_holders(name), f"the key of {name} is free", timeout=40)
        told = until(lambda: len(found := recorder.events("told")) == len(combined.told) and found, "theirs is told")

    assert {event.key for event in told} == set(combined.told)


def test_calls_of_a_key_that_is_held_here_end_as_lock_on_store_error_says(recorder: Recorder) -> None:
    task = tasks.waiting_without_store
    with running("valkey") as store, workers(APP, {"TEST_LOCKS": store.url}):
        holder = recorder.begun(task.delay("k", gate="the end"))
        store.stop()
        for result in [task.delay("k", number) for number in range(4)]:
            with pytest.raises(StoreError, match=f"127.0.0.1:{store.port}"):
                result.get(timeout=30)
        recorder.open_gate("the end")
        holder.forget()


def test_the_main_process_keeps_the_lease_of_a_living_child_and_of_no_other(recorder: Recorder) -> None:
    tasks = {"lives": children.holds_the_gil, "dies": children.holds_the_gil, "stops": children.is_stopped}
    with workers(children.__name__, concurrency=4):
        first = {key: task.delay(key, 600) for key, task in tasks.items()}
        run = {key: begun(recorder, key) for key in first}
        os.kill(run["stops"].pid, signal.SIGSTOP)
        second = {key: task.delay(key, 0) for key, task in tasks.items()}
        # Only the main process can renew: each body holds the GIL from its beginning.
        until(lambda: all(is_renewed(run[key]) for key in ("lives", "dies")), "both are renewed", timeout=SOON)

        os.kill(run["dies"].pid, signal.SIGKILL)
        for key in ("dies", "stops"):
            second[key].get(timeout=SOON)
        os.kill(run["stops"].pid, signal.SIGCONT)
        assert [event.run for event in of_key(recorder, "lives", "enter")] == [first["lives"].id]


def is_renewed(event: Event) -> bool:
    """Its lease lasts longer than that of its grant."""
    (holder,) = children.holds_the_gil.lock_holders(event.key, 0)
    assert holder.task_id == event.run
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - event.at
    return bool(since + holder.expires_in > children.TTL + 2)


def test_a_child_that_is_to_be_killed_is_dead_before_the_next_run_begins(recorder: Recorder) -> None:
    with workers(children.__name__, concurrency=2):
        children.is_killed.delay("k", 600)
        first = begun(recorder, "k")
        second = children.is_killed.delay("k", 0)
        until(lambda: second.id in [event.run for event in recorder.events("enter")], "the next runs", timeout=SOON)
        assert not is_alive(first.pid)


def begun(recorder: Recorder, key: str) -> Event:
    return until(lambda: of_key(recorder, key, "enter"), "it runs", timeout=SOON)[0]
