"""A store that is away when a task wants its lock: no job is lost, none runs unlocked unasked."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import StoreError
from tests.acceptance.conftest import APP
from tests.acceptance.test_commands import LOCKS, Overheard
from tests.proxy import Proxy
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers


@pytest.fixture
def store() -> Iterator[Server]:
    """A store of locks that is not running yet."""
    server = Server("valkey")
    yield server
    server.close()


@pytest.fixture
def worker(env: dict[str, str], store: Server) -> Iterator[Worker]:
    with workers(APP, {**env, "TEST_LOCKS": store.url}) as (worker,):
        yield worker


def test_the_job_comes_again_until_the_store_is_back(
    tasks: Any, worker: Worker, store: Server, recorder: Recorder
) -> None:
    result = tasks.skipped.delay("k")
    until(lambda: "lock.unanswered" in worker.log(), "the task has noticed")
    store.start()

    assert result.get(timeout=30) == "ran"
    assert len(recorder.events("enter")) == 1


def test_a_job_that_gets_no_answer_gives_up_after_its_lock_wait_timeout(tasks: Any, worker: Worker) -> None:
    with pytest.raises(StoreError, match=r"tried for \d+\.\d s, and lock_wait_timeout is 1 s"):
        tasks.impatient["reschedule"].delay("k").get(timeout=30)

    assert worker.log().count("lock.unanswered") == 1


def test_a_time_limit_is_not_used_up_by_a_store_that_is_silent(
    tasks: Any, env: dict[str, str], valkey: Server, recorder: Recorder
) -> None:
    with Proxy(valkey.port) as proxy, workers(APP, {**env, "TEST_LOCKS": proxy.url}) as (worker,):
        proxy.black_hole()
        limited = tasks.skipped.apply_async(("soft",), soft_time_limit=2)
        killed = tasks.skipped.apply_async(("hard",), time_limit=3)
        until(lambda: worker.log().count("lock.unanswered") >= 2, "both have noticed")
        # What was swallowed would be answered never.
        proxy.cut()
        proxy.forward()

        assert limited.get(timeout=30) == killed.get(timeout=30) == "ran"
    assert len(recorder.events("enter")) == 2


@pytest.mark.prove
def test_many_that_find_the_store_away_leave_room_for_the_tasks_of_others(tasks: Any, worker: Worker) -> None:
    for number in range(30):
        tasks.skipped.delay(number)
    until(lambda: worker.log().count("lock.unanswered") >= 1, "the first has noticed")

    # Each of the others would keep a process for five seconds.
    assert tasks.collect.delay("ran").get(timeout=20) == "ran"


def test_raise_fails_the_job_with_the_store_named(tasks: Any, worker: Worker, store: Server) -> None:
    with pytest.raises(StoreError, match=f"127.0.0.1:{store.port}"):
        tasks.raising_without_store.delay("k").get(timeout=20)


def test_run_runs_without_a_lock(tasks: Any, worker: Worker) -> None:
    assert tasks.running_without_store.delay("k").get(timeout=20) is True


def test_skip_revokes_the_job(tasks: Any, worker: Worker, recorder: Recorder) -> None:
    with pytest.raises(TaskRevokedError, match="did not answer"):
        tasks.skipping_without_store.delay("k").get(timeout=20)

    assert recorder.events("enter") == []


def test_a_slow_release_has_no_retry_stored_over_the_end_of_the_next_attempt(
    tasks: Any, env: dict[str, str], valkey: Server
) -> None:
    # The lock is free, and the reply that says so is lost: the first attempt is still at it when the second has ended.
    with Proxy(valkey.port) as proxy, workers(APP, {**env, "TEST_LOCKS": f"{proxy.url[:-1]}{LOCKS}"}, 2) as pair:
        overheard = Overheard(valkey)
        assert tasks.retrying.delay("known scripts").get(timeout=20) == 1
        key = tasks.retrying.lock_key_for("known scripts")
        with valkey.client(LOCKS) as locks:
            until(lambda: not locks.exists(key), "it is released")
            locks.exists("all before is heard")
        until(lambda: overheard.about("all before is heard"), "all of it is heard")
        # The last script that was run for that lock is its release.
        release = [said for said in overheard.about(key) if said.startswith("EVALSHA")][-1].split()[1]
        overheard.close()
        lost = proxy.lose_reply(release.encode())
        # Celery itself stores nothing over a success.
        result = tasks.retrying.delay("k", fails=True)
        assert lost.wait(20)
        told = f"[{result.id}] retry: Retry in 0s"
        until(lambda: any(told in worker.log() for worker in pair), "the first attempt has ended")

        with pytest.raises(ValueError, match="the end"):
            result.get(timeout=20)
        assert tasks.app.AsyncResult(result.id).state == states.FAILURE
