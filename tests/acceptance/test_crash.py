"""P2 and P4, nothing stuck and you are told: workers that die, stop, or lose their lease."""

import os
import signal
import time
from typing import Any

import pytest
from celery.apps import worker

from celery_singleton_lock import LockLost
from tests.acceptance.conftest import APP
from tests.recorder import Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

TTL = 3.0


def test_after_a_worker_is_killed_in_the_midst_of_a_run_the_next_call_runs_within_the_ttl(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, env, 2) as pair:
        tasks.rescheduled.delay("k", 1, seconds=60)
        first = until(lambda: recorder.events("enter"), "the first run has begun")[0]
        victim = next(worker for worker in pair if os.getpgid(first.pid) == worker.pid)
        victim.kill()
        killed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert tasks.rescheduled.delay("k", 2).get(timeout=20) == 2

    second = recorder.events("enter")[1]
    # One ttl for the key to come free, and the longest delay of a rescheduled call to notice.
    assert second.at - killed_at < TTL + 2.0 + 5.0
    assert second.facts["took_over"]
    assert second.facts["fence"] > first.facts["fence"]


@pytest.mark.skipif(not hasattr(worker, "on_cold_shutdown"), reason="Celery 5.4 tells nobody of what it cuts off")
def test_a_run_that_a_shutdown_cuts_off_does_not_end_with_the_result_of_an_earlier_call_with_its_task_id(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    task = tasks.by_policy["skip"]
    with workers(APP, env, 1) as (its_worker,):
        # Some backends never overwrite a success.
        task.apply_async(("k", 1), {"fails": True}, task_id="nightly").get(timeout=20, propagate=False)
        task.apply_async(("k", 2), {"gate": "never"}, task_id="nightly")
        until(lambda: len(recorder.events("enter")) == 2, "it runs again")
        # What its main process has not yet heard of, Celery does not cut off: it waits for the body.
        until(lambda: any((tasks.app.control.inspect().active() or {}).values()), "its worker knows of it")
        its_worker.send(signal.SIGQUIT)
        its_worker.wait()

    assert task.AsyncResult("nightly").state == "RETRY"


def test_a_run_longer_than_its_ttl_keeps_its_lease(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    with workers(APP, env, 2):
        long_run = tasks.rescheduled.delay("k", 1, seconds=10)
        until(lambda: recorder.events("enter"), "the long run has begun")
        other = tasks.rescheduled.delay("k", 2)

        assert (long_run.get(timeout=30), other.get(timeout=30)) == (1, 2)

    assert overlaps(recorder.events()) == []


def test_a_release_after_expiry_leaves_the_successors_lock_alone(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, env, 2):
        paused = tasks.aborted.delay("k", 60)
        first = until(lambda: recorder.events("enter"), "the first run has begun")[0]
        os.kill(first.pid, signal.SIGSTOP)
        until(lambda: not tasks.aborted.lock_holders("k", 60), "the lease of the stopped run has expired")
        successor = tasks.aborted.delay("k", 60)
        until(lambda: len(recorder.events("enter")) == 2, "the successor runs")
        os.kill(first.pid, signal.SIGCONT)

        with pytest.raises(LockLost):
            paused.get(timeout=10)
        holders = tasks.aborted.lock_holders("k", 60)
        assert [holder.task_id for holder in holders] == [successor.id]


def test_a_body_whose_lease_is_gone_is_interrupted_out_of_its_sleep(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    with workers(APP, env):
        result = tasks.aborted.delay("k", 60)
        until(lambda: recorder.events("enter"), "the run has begun")
        with valkey.client(database=2) as client:
            client.flushdb()

        with pytest.raises(LockLost, match="expired"):
            result.get(timeout=10)

    told = recorder.events("told")[0]
    assert told.facts["reason"] == "expired"
    assert told.facts["remaining"] == 0.0


def test_retry_with_no_countdown_loses_nothing(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    with workers(APP, env, 2):
        results = [tasks.retrying.delay(number, attempts=1) for number in range(20)]
        assert [result.get(timeout=30) for result in results] == [1] * 20

    assert overlaps(recorder.events()) == []


def test_a_retry_that_arrives_before_its_body_has_ended_waits_for_it(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, env, 2):
        # One at a time, so that others are idle and take the retry while the body still ends.
        assert [tasks.retrying.delay(n, attempts=2, finish=0.5).get(timeout=30) for n in range(2)] == [2, 2]

    assert overlaps(recorder.events()) == []
    assert len(recorder.events("enter")) == 6
