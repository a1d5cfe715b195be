"""P3 and P5: what the caller of a run without the lock sees, for each policy, in each place of a canvas."""

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group, states
from celery.exceptions import TaskRevokedError

from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP, one_valkey
from tests.recorder import Recorder, numbers, of_key, overlaps
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import Worker, workers

valkey = one_valkey()


@pytest.fixture(scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.prove)])
def worker(request: pytest.FixtureRequest, valkey: Server) -> Iterator[Worker]:
    broker = valkey.url if request.param == "redis" else request.getfixturevalue("rabbit")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TEST_BROKER", broker)
        tasks.app.conf.broker_url = broker
        # Unlike Redis, RabbitMQ still has what an earlier test has left.
        tasks.app.control.purge()
        with workers(APP, concurrency=6) as (worker,):
            yield worker


@pytest.fixture(autouse=True)
def at_its_broker(worker: Worker, tasks: Any) -> None:
    tasks.app.conf.broker_url = os.environ["TEST_BROKER"]


def hold(recorder: Recorder, policy: str, *keys: str, seconds: float = 0.0, gate: str) -> list[Any]:
    held = [tasks.by_policy[policy].delay(key, 1, seconds, gate=gate) for key in keys]
    until(lambda: all(of_key(recorder, key, "enter") for key in keys), "the holders run")
    return held


def met(worker: Worker) -> set[str]:
    return set(re.findall(r"lock\.(?:conflict|waiting) .*task_id=(\S+) holder=", worker.log()))


def after_a_holder(worker: Worker, recorder: Recorder, policy: str, key: str) -> list[Any]:
    task, before = tasks.by_policy[policy], len(met(worker))
    # A run that is replaced is interrupted in its sleep, and not while it asks about the gate.
    seconds = 30 if policy == "replace" else 0
    alone, grouped, chained, in_header, in_body = (f"{key} {place}" for place in range(5))
    hold(recorder, policy, alone, grouped, chained, seconds=seconds, gate=f"{key} three")
    single = task.delay(alone, 2)
    members = group(task.s(grouped, 3), task.s(f"{key} free")).delay()
    steps = chain(task.si(chained, 4), tasks.after.s()).delay()
    until(lambda: len(met(worker)) == before + 3, "three calls have met a holder", timeout=SOON)
    recorder.open_gate(f"{key} three")
    found = [in_the_end(each) for each in (single, members, steps)]
    hold(recorder, policy, in_header, in_body, seconds=seconds, gate=f"{key} five")
    header = chord([task.s(in_header, 5), task.s(f"{key} free too")])(tasks.collect.s())
    body = chord([task.s(f"{key} free three")])(task.si(in_body, 6))
    until(lambda: len(met(worker)) == before + 5, "five calls have met a holder", timeout=SOON)
    recorder.open_gate(f"{key} five")
    return [*found, in_the_end(header), in_the_end(body)]


def in_the_end(result: Any) -> Any:
    """Its result; asked for, because Celery may miss one that comes just as `get` begins to listen for its id."""
    until(result.ready, "it has ended", timeout=SOON)
    return result.get(timeout=SOON)


@pytest.mark.parametrize("policy", ["reschedule", "wait", "rerun", "replace"])
def test_who_comes_later_ends_with_its_own_result(worker: Worker, recorder: Recorder, policy: str, key: str) -> None:
    assert after_a_holder(worker, recorder, policy, key) == [2, [3, 0], ["after", 4], [5, 0], 6]
    assert overlaps(recorder.events()) == []


def test_join_ends_with_the_holders_result(worker: Worker, recorder: Recorder, key: str) -> None:
    assert after_a_holder(worker, recorder, "join", key) == [1, [1, 0], ["after", 1], [1, 0], 1]


def test_skip_ends_with_the_holder_named(recorder: Recorder, key: str) -> None:
    task = tasks.by_policy["skip"]
    (holder,) = hold(recorder, "skip", key, gate=key)

    single, members = task.delay(key), group(task.s(key), task.s(f"{key} free")).delay()
    steps = chain(task.si(key), tasks.after.s()).delay()
    header = chord([task.s(key), task.s(f"{key} free too")])(tasks.collect.s())
    body = chord([task.s(f"{key} free three")])(task.si(key))

    for result in (single, members, steps, body):
        with pytest.raises(TaskRevokedError, match=holder.id):
            result.get(timeout=SOON)
    assert single.state == states.REVOKED
    assert header.get(timeout=SOON) == [None, 0]
    recorder.open_gate(key)


def test_a_skip_result_is_returned_everywhere(key: str) -> None:
    task = tasks.skipped_with_result
    with task.lock_for(key):
        single = task.delay(key)
        grouped = group(task.s(key), task.s(f"{key} free")).delay()
        chained = chain(task.si(key), tasks.after.s()).delay()
        header = chord([task.s(key), task.s(f"{key} free too")])(tasks.collect.s())

        assert single.get(timeout=SOON) == "was skipped"
        assert grouped.get(timeout=SOON) == ["was skipped", "ran"]
        assert chained.get(timeout=SOON) == ["after", "was skipped"]
        assert header.get(timeout=SOON) == ["was skipped", "ran"]


@pytest.mark.prove
def test_a_retry_is_not_superseded_by_the_call_that_came_after_its_run(recorder: Recorder, key: str) -> None:
    first = recorder.begun(tasks.rerun_and_retried.delay(key, 1, countdown=0, seconds=1.0))
    second = tasks.rerun_and_retried.delay(key, 2)

    assert (first.get(timeout=SOON), second.get(timeout=SOON)) == (1, 2)
    assert sorted(numbers(recorder, key)) == [1, 1, 2]


def test_join_ends_with_the_holders_error(worker: Worker, recorder: Recorder, key: str) -> None:
    task, before = tasks.by_policy["join"], len(met(worker))
    recorder.begun(task.delay(key, 7, fails=True, gate=key))

    joiners = [task.delay(key, number) for number in range(3)]
    until(lambda: len(met(worker)) == before + 3, "they join")
    recorder.open_gate(key)

    for result in joiners:
        with pytest.raises(ValueError, match="7"):
            result.get(timeout=SOON)
    assert len(of_key(recorder, key, "enter")) == 1
