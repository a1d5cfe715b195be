"""Waiting in place, several at once, and a cool-down, on a real worker."""

from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockLost
from celery_singleton_lock.testing import expire
from tests.acceptance import app as tasks
from tests.acceptance.conftest import one_worker
from tests.recorder import Recorder, most_at_once, numbers, of_key, overlaps
from tests.waiting import SOON, until

valkey, worker = one_worker(6, autouse=True)


def test_waiting_calls_run_in_the_order_of_their_arrival_and_never_two_at_once(recorder: Recorder) -> None:
    task, key = tasks.by_policy["wait"], "in order"
    results = [task.delay(key, 0, gate=key)]
    until(lambda: of_key(recorder, key), "the first one runs")
    for number in range(1, 5):
        results.append(task.delay(key, number))
        until(lambda number=number: task.lock_state(key).waiting == number, "it queues")
    recorder.open_gate(key)

    assert [result.get(timeout=SOON) for result in results] == list(range(5))
    assert overlaps(of_key(recorder, key)) == []
    assert numbers(recorder, key) == list(range(5))


def test_a_call_that_waits_in_the_pool_ends_when_it_expires(recorder: Recorder) -> None:
    task, key = tasks.by_policy["wait"], "expires"
    first = recorder.begun(task.delay(key, 1, gate=key))
    with pytest.raises(TaskRevokedError, match="expired"):
        task.apply_async((key, 2), expires=3).get(timeout=60)
    recorder.open_gate(key)

    assert first.get(timeout=SOON) == 1
    assert numbers(recorder, key) == [1]


def test_as_many_run_at_once_as_the_limit_says(recorder: Recorder) -> None:
    results = [tasks.three_at_once.delay("limit", 0.3) for _ in range(12)]

    assert [result.get(timeout=SOON) for result in results] == ["ran"] * 12
    assert most_at_once(of_key(recorder, "limit")) == 3


@pytest.mark.parametrize("mode", ["while_executing", *tasks.MODES])
def test_a_run_that_fails_leaves_no_cool_down_where_only_a_success_starts_one(recorder: Recorder, mode: str) -> None:
    task, retried = (tasks.cooling_after_success[mode + retries] for retries in ("", " with retries"))
    with pytest.raises(ValueError, match="1"):
        task.delay(mode, 1, fails=True).get(timeout=SOON)
    until(lambda: task.lock_state(mode).cooldown_until is None, "it is over")
    second = task.delay(mode, 2)
    assert second.get(timeout=SOON) == 2
    assert did_not_run(task.delay(mode, 3), second)

    first = retried.delay(mode, 1, fails=True)
    until(lambda: first.state == "RETRY", "it will come again")
    assert did_not_run(retried.delay(mode, 2), first)
    assert numbers(recorder, mode) == [1, 2, 1]


def did_not_run(result: Any, other: Any) -> bool:
    """The call was not published, or was skipped, because of the other one."""
    if result.id == other.id:
        return True
    with pytest.raises(TaskRevokedError, match=other.id):
        result.get(timeout=SOON)
    return True


def test_a_run_that_loses_its_lease_leaves_no_cool_down_where_only_a_success_starts_one(recorder: Recorder) -> None:
    task, key = tasks.cooling_after_success["until_executed"], "lost"
    first = recorder.begun(task.delay(key, 1, gate="never"))
    expire(task, key)
    with pytest.raises(LockLost):
        first.get(timeout=SOON)
    until(lambda: task.lock_state(key).cooldown_until is None, "it is over")
    assert task.delay(key, 2).get(timeout=SOON) == 2
