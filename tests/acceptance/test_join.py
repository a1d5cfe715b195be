"""`join` ends with the result of the holder's own run, and says so where it could read none."""

from typing import Any

import pytest
from celery import VERSION

from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.recorder import Recorder
from tests.waiting import until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove


@pytest.mark.parametrize("later", [["the last"], ["the second", "the last"]], ids=len)
def test_a_joiner_follows_its_holder_to_what_replaces_that(recorder: Recorder, later: list[str]) -> None:
    task = combined.joined_handing_on
    tracking = {"TEST_TRACKING": "yes"}
    with workers("tests.acceptance.combined_app", tracking, 1, concurrency=4) as (worker,):
        holder = recorder.begun(task.delay("k", "its own", *later))
        joiner = task.delay("k", "its own", *later)
        until(lambda: times_joined(worker, joiner) > 0, "it has joined")
        recorder.open_gate("its own")
        until(lambda: not task.lock_holders("k", "its own"), "the holder has handed on")
        for gate in later:
            before = times_joined(worker, joiner)
            until(lambda: times_joined(worker, joiner) > before + 4, "it follows for seconds")  # noqa: B023
            recorder.open_gate(gate)

        assert holder.get(timeout=40) == joiner.get(timeout=10) == "the last"
    assert [event.run for event in recorder.events("enter")] == [holder.id]


@pytest.mark.parametrize("end", ["killed", "ignored"])
@pytest.mark.parametrize("by", ["retry", "replace"])
def test_a_joiner_runs_if_a_later_attempt_of_its_holder_leaves_no_result(recorder: Recorder, by: str, end: str) -> None:
    task, run = combined.joined_going_on, ("tests.acceptance.combined_app", {})
    with workers(*run) as (holders,), workers(*run, 1, "-Q", "joiners") as (joiners,):
        recorder.begun(task.delay("k", 0, by, "it ends", end))
        joiner = task.apply_async(("k", 1), queue="joiners")
        until(lambda: times_joined(joiners, joiner) >= 2, "it has joined that")
        if end == "killed":
            holders.kill()
        recorder.open_gate("it ends")

        assert joiner.get(timeout=40) == 1


def test_a_joiner_runs_if_the_retry_of_its_holder_was_not_published(recorder: Recorder) -> None:
    task = combined.joined_unpublished
    with workers("tests.acceptance.combined_app", {}, 1, concurrency=2) as (worker,):
        recorder.begun(task.delay("k", "it retries"))
        joiner = task.delay("k", "it retries")
        until(lambda: times_joined(worker, joiner) > 0, "it has joined")
        recorder.open_gate("it retries")

        # From Celery 5.7 on, the end of the holder is stored, and so is the joiner's.
        end = joiner.get(timeout=40, propagate=False)
    assert end == "ran" or VERSION >= (5, 7)


def test_a_joiner_does_not_take_the_result_of_an_earlier_call_with_that_id(recorder: Recorder) -> None:
    task, run = tasks.by_policy["join"], ("tests.acceptance.app", {})
    with workers(*run, 1, "-Q", "joiners") as (joiners,):
        with workers(*run, 1) as (holders,):
            assert task.apply_async(("k", 1), task_id="nightly").get(timeout=40) == 1
            task.apply_async(("k", 2), {"gate": "never"}, task_id="nightly")
            until(lambda: len(recorder.events("enter")) == 2, "it runs again")
            joiner = task.apply_async(("k", 3), queue="joiners")
            until(lambda: times_joined(joiners, joiner) > 0, "it has joined")
            holders.kill()

        assert joiner.get(timeout=40) == 3


def times_joined(worker: Worker, joiner: Any) -> int:
    """By the line of Celery; ours is at INFO for the first time only."""
    return worker.log().count(f"[{joiner.id}] retry:")
