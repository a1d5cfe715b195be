"""P3 and P5, nothing lost and nothing hangs: what the caller of a run without the lock sees."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group, states
from celery.exceptions import ChordError, TaskRevokedError

from celery_singleton_lock import LockHeld
from tests.acceptance.conftest import APP
from tests.recorder import Recorder
from tests.waiting import until
from tests.workers import Worker, workers

# Far more than any of these needs, far less than a hang.
PROMPTLY = 30


@pytest.fixture
def worker(env: dict[str, str]) -> Iterator[Worker]:
    with workers(APP, env, 1, concurrency=3) as (worker,):
        yield worker


@pytest.fixture
def holder(tasks: Any, worker: Worker, recorder: Recorder) -> Any:
    """A run of key `k` of each task under test that goes on until its worker is stopped."""
    held = [task.delay("k", 30) for task in (tasks.skipped,)]
    until(lambda: recorder.events("enter"), "the holder runs")
    return held[0]


def test_a_skipped_member_of_a_group_raises_at_once(tasks: Any, holder: Any) -> None:
    result = group(tasks.skipped.s("k"), tasks.skipped.s("free")).delay()

    with pytest.raises(TaskRevokedError, match=holder.id):
        result.get(timeout=PROMPTLY)

    assert result.children[1].get(timeout=PROMPTLY) == "ran"


def test_a_skipped_step_ends_its_chain_at_once(tasks: Any, holder: Any) -> None:
    result = chain(tasks.skipped.si("free"), tasks.skipped.si("k"), tasks.after.s()).delay()

    with pytest.raises(TaskRevokedError, match=holder.id):
        result.get(timeout=PROMPTLY)

    assert result.parent.parent.get(timeout=PROMPTLY) == "ran"


def test_a_skipped_member_of_a_chord_header_is_none_and_the_body_runs(tasks: Any, holder: Any) -> None:
    result = chord([tasks.skipped.s("k"), tasks.skipped.s("free")])(tasks.collect.s())

    assert result.get(timeout=PROMPTLY) == [None, "ran"]


def test_a_skipped_step_of_a_chain_in_a_chord_header_does_not_hang_the_chord(tasks: Any, holder: Any) -> None:
    result = chord([chain(tasks.skipped.si("k"), tasks.after.s()), tasks.skipped.s("free")])(tasks.collect.s())

    with pytest.raises((TaskRevokedError, ChordError)):
        result.get(timeout=PROMPTLY)


def test_a_skip_result_is_returned_everywhere(tasks: Any, worker: Worker, recorder: Recorder) -> None:
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


def test_raise_fails_the_duplicate_with_the_holder_named(tasks: Any, worker: Worker, recorder: Recorder) -> None:
    first = tasks.refused.delay("k", 30)
    until(lambda: recorder.events("enter"), "the holder runs")

    result = tasks.refused.delay("k")

    with pytest.raises(LockHeld) as raised:
        result.get(timeout=PROMPTLY)
    assert result.state == states.FAILURE
    assert raised.value.holder_task_id == first.id
    assert raised.value.key == tasks.refused.lock_key_for("k")
    assert 0 < raised.value.expires_in <= 3


def test_a_rescheduled_call_burns_no_retries_and_keeps_its_canvas(
    tasks: Any, worker: Worker, recorder: Recorder
) -> None:
    tasks.rescheduled.delay("k", 0, seconds=1.5)
    until(lambda: recorder.events("enter"), "the holder runs")

    header = chord([tasks.rescheduled.s("k", 1), tasks.rescheduled.s("k", 2)])(tasks.collect.s())
    chained = chain(tasks.rescheduled.si("k", 3), tasks.after.s()).delay()

    assert header.get(timeout=20) == [1, 2]
    assert chained.get(timeout=20) == ["after", 3]
    assert "outcome=rescheduled" in worker.log()
