"""P3 and P5: what the caller of a run without the lock sees, for each policy, in each place of a canvas."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group, states
from celery.exceptions import TaskRevokedError

from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP
from tests.recorder import Recorder, overlaps
from tests.waiting import until
from tests.workers import Worker, workers

PROMPTLY = 30
HOLDS = 1.5


@pytest.fixture
def worker(broker: str, tasks_by_broker: Any) -> Iterator[Worker]:
    with workers(APP, {"TEST_BROKER": broker}, concurrency=6) as (worker,):
        yield worker


def hold(recorder: Recorder, policy: str, *keys: str, seconds: float = HOLDS, gate: str | None = None) -> list[Any]:
    held = [tasks.by_policy[policy].delay(key, 1, seconds, gate=gate) for key in keys]
    until(lambda: len(recorder.events("enter")) == len(keys), "the holders run")
    return held


def before_the_gate(policy: str) -> int:
    """Seconds of sleep; a run that is replaced is interrupted in it, and not while it asks about the gate."""
    return 30 if policy == "replace" else 0


def met(worker: Worker) -> set[str]:
    return set(re.findall(r"lock\.(?:conflict|waiting) .*task_id=(\S+) holder=", worker.log()))


def after_a_holder(worker: Worker, recorder: Recorder, policy: str) -> list[Any]:
    """A single call, a group, a chain, a chord header and a chord body that meet a holder each."""
    task = tasks.by_policy[policy]
    seconds = before_the_gate(policy)
    hold(recorder, policy, "single", "group", "chain", seconds=seconds, gate="three")
    single = task.delay("single", 2)
    members = group(task.s("group", 3), task.s("free")).delay()
    steps = chain(task.si("chain", 4), tasks.after.s()).delay()
    until(lambda: len(met(worker)) == 3, "three calls have met a holder", timeout=PROMPTLY)
    recorder.open_gate("three")
    found = [in_the_end(each) for each in (single, members, steps)]
    recorder._client.delete("record")
    hold(recorder, policy, "header", "body", seconds=seconds, gate="five")
    header = chord([task.s("header", 5), task.s("free too")])(tasks.collect.s())
    body = chord([task.s("free three")])(task.si("body", 6))
    until(lambda: len(met(worker)) == 5, "five calls have met a holder", timeout=PROMPTLY)
    recorder.open_gate("five")
    return [*found, in_the_end(header), in_the_end(body)]


def in_the_end(result: Any) -> Any:
    """Its result; asked for, because Celery may miss one that comes just as `get` begins to listen for its id."""
    until(result.ready, "it has ended", timeout=PROMPTLY)
    return result.get(timeout=PROMPTLY)


@pytest.mark.parametrize("policy", ["reschedule", "wait", "rerun", "replace"])
def test_who_comes_later_ends_with_its_own_result(worker: Worker, recorder: Recorder, policy: str) -> None:
    assert after_a_holder(worker, recorder, policy) == [2, [3, 0], ["after", 4], [5, 0], 6]
    assert overlaps(recorder.events()) == []


def test_join_ends_with_the_holders_result(worker: Worker, recorder: Recorder) -> None:
    assert after_a_holder(worker, recorder, "join") == [1, [1, 0], ["after", 1], [1, 0], 1]


def test_skip_ends_with_the_holder_named(worker: Worker, recorder: Recorder) -> None:
    task = tasks.by_policy["skip"]
    (holder,) = hold(recorder, "skip", "k", seconds=30)

    single, members = task.delay("k"), group(task.s("k"), task.s("free")).delay()
    steps = chain(task.si("k"), tasks.after.s()).delay()
    header, body = chord([task.s("k"), task.s("free2")])(tasks.collect.s()), chord([task.s("free3")])(task.si("k"))

    for result in (single, members, steps, body):
        with pytest.raises(TaskRevokedError, match=holder.id):
            result.get(timeout=PROMPTLY)
    assert single.state == states.REVOKED
    assert header.get(timeout=PROMPTLY) == [None, 0]


def test_a_skip_result_is_returned_everywhere(worker: Worker, recorder: Recorder) -> None:
    task = tasks.skipped_with_result
    task.delay("k", 30)
    until(lambda: recorder.events("enter"), "the holder runs")

    single = task.delay("k")
    grouped = group(task.s("k"), task.s("free")).delay()
    chained = chain(task.si("k"), tasks.after.s()).delay()
    header = chord([task.s("k"), task.s("free2")])(tasks.collect.s())

    assert single.get(timeout=PROMPTLY) == "was skipped"
    assert grouped.get(timeout=PROMPTLY) == ["was skipped", "ran"]
    assert chained.get(timeout=PROMPTLY) == ["after", "was skipped"]
    assert header.get(timeout=PROMPTLY) == ["was skipped", "ran"]


@pytest.mark.prove
def test_a_retry_is_not_superseded_by_the_call_that_came_after_its_run(worker: Worker, recorder: Recorder) -> None:
    first = tasks.rerun_and_retried.delay("k", 1, countdown=0, seconds=1.0)
    until(lambda: recorder.events("enter"), "it runs")
    second = tasks.rerun_and_retried.delay("k", 2)

    assert (first.get(timeout=PROMPTLY), second.get(timeout=PROMPTLY)) == (1, 2)
    assert sorted(event.facts["number"] for event in recorder.events("enter")) == [1, 1, 2]


def test_join_ends_with_the_holders_error(worker: Worker, recorder: Recorder) -> None:
    task = tasks.by_policy["join"]
    task.delay("k", 7, fails=True, gate="all have joined")
    until(lambda: recorder.events("enter"), "the holder runs")

    joiners = [task.delay("k", number) for number in range(3)]
    until(lambda: len(met(worker)) == 3, "they join")
    recorder.open_gate("all have joined")

    for result in joiners:
        with pytest.raises(ValueError, match="7"):
            result.get(timeout=PROMPTLY)
    assert len(recorder.events("enter")) == 1
