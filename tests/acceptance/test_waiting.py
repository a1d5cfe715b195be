"""Waiting in place, several at once, and a cool-down, on real workers."""

from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockLost
from celery_singleton_lock.testing import expire
from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP
from tests.recorder import Recorder, most_at_once, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers


def test_waiting_calls_run_in_the_order_of_their_arrival_and_never_two_at_once(
    recorder: Recorder, valkey: Server
) -> None:
    task = tasks.by_policy["wait"]
    with workers(APP, concurrency=5):
        first = task.delay("k", 0, gate="all queue")
        until(lambda: recorder.events("enter"), "the first one runs")
        others = []
        for number in range(1, 5):
            others.append(task.delay("k", number))
            until(lambda n=number: task.lock_state("k").waiting == n, "it queues")
        recorder.open_gate("all queue")
        assert [result.get(timeout=40) for result in [first, *others]] == list(range(5))

    assert overlaps(recorder.events()) == []
    assert [event.facts["number"] for event in recorder.events("enter")] == list(range(5))


def test_a_call_that_waits_in_the_pool_ends_when_it_expires(recorder: Recorder) -> None:
    task = tasks.by_policy["wait"]
    with workers(APP, concurrency=3):
        first = task.delay("k", 1, gate="it has expired")
        until(lambda: recorder.events("enter"), "the first one runs")
        expired = task.apply_async(("k", 2), expires=3)
        with pytest.raises(TaskRevokedError, match="expired"):
            expired.get(timeout=60)
        recorder.open_gate("it has expired")
        assert first.get(timeout=40) == 1
    assert [event.facts["number"] for event in recorder.events("enter")] == [1]


def test_as_many_run_at_once_as_the_limit_says(recorder: Recorder) -> None:
    with workers(APP, {}, 2, concurrency=3):
        results = [tasks.three_at_once.delay("k", 0.3) for _ in range(12)]
        assert [result.get(timeout=30) for result in results] == ["ran"] * 12

    assert most_at_once(recorder.events()) == 3


@pytest.mark.parametrize(
    "mode",
    [
        "while_executing",
        "until_executed",
        *(pytest.param(f"until_{each}", marks=pytest.mark.prove) for each in ("executing", "and_while_executing")),
    ],
)
def test_a_run_that_fails_leaves_no_cool_down_where_only_a_success_starts_one(recorder: Recorder, mode: str) -> None:
    task, retried = (tasks.cooling_after_success[mode + retries] for retries in ("", " with retries"))
    with workers(APP):
        with pytest.raises(ValueError, match="1"):
            task.delay("k", 1, fails=True).get(timeout=30)
        until(lambda: task.lock_state("k").cooldown_until is None, "it is over")
        second = task.delay("k", 2)
        assert second.get(timeout=30) == 2
        assert did_not_run(task.delay("k", 3), second)

        # A retry is no end.
        first = retried.delay("k", 1, fails=True)
        until(lambda: first.state == "RETRY", "it will come again")
        assert did_not_run(retried.delay("k", 2), first)
    assert [event.facts["number"] for event in recorder.events("enter")] == [1, 2, 1]


def did_not_run(result: Any, other: Any) -> bool:
    """The call was not published, or was skipped, because of the other one."""
    if result.id == other.id:
        return True
    with pytest.raises(TaskRevokedError, match=other.id):
        result.get(timeout=30)
    return True


def test_a_run_that_loses_its_lease_leaves_no_cool_down_where_only_a_success_starts_one(recorder: Recorder) -> None:
    task = tasks.cooling_after_success["until_executed"]
    with workers(APP):
        first = task.delay("k", 1, gate="never")
        until(lambda: recorder.events("enter"), "it runs")
        expire(task, "k")
        with pytest.raises(LockLost):
            first.get(timeout=30)
        until(lambda: task.lock_state("k").cooldown_until is None, "it is over")
        assert task.delay("k", 2).get(timeout=30) == 2
