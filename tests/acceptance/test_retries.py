"""A retry runs under the key of its own arguments, when it was asked to."""

import pytest

from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import one_worker
from tests.recorder import Recorder, of_key, overlaps
from tests.waiting import until
from tests.workers import Worker

PROMPTLY = 40


valkey, worker = one_worker(4)


@pytest.mark.parametrize("mode", ["until_executed", "until_and_while_executing"])
def test_a_retry_with_other_arguments_runs_under_their_key(worker: Worker, recorder: Recorder, mode: str) -> None:
    task, old, new = combined.retrying_by_mode[mode], f"old-{mode}", f"new-{mode}"

    assert task.delay(old, 1, countdown=0, key_of_retry=new).get(timeout=PROMPTLY) == 1

    held = {event.key: event.facts["lock"] for event in recorder.events("enter") if event.key in (old, new)}
    assert held == {old: task.lock_key_for(old), new: task.lock_key_for(new)}


@pytest.mark.parametrize("mode", ["until_executed", "until_and_while_executing"])
def test_a_retry_with_other_arguments_does_not_run_beside_another_call_of_them(
    worker: Worker, recorder: Recorder, mode: str
) -> None:
    task, old, new = combined.retrying_by_mode[mode], f"from-{mode}", f"to-{mode}"
    other = task.delay(new, 1, gate=new)
    until(lambda: of_key(recorder, new), "another call of the new arguments runs")

    retried = task.delay(old, 2, countdown=0, key_of_retry=new)
    has_met = f"task_id={retried.id} holder="
    until(lambda: has_met in worker.log() or len(of_key(recorder, new)) > 1, "the retry has come")
    recorder.open_gate(new)

    assert (other.get(timeout=PROMPTLY), retried.get(timeout=PROMPTLY)) == (1, 2)
    assert overlaps(of_key(recorder, new)) == []


@pytest.mark.parametrize("policy", combined.retrying_or_ending)
def test_a_retry_does_not_end_for_a_successor_that_has_yet_to_come(
    worker: Worker, recorder: Recorder, policy: str
) -> None:
    task, key = combined.retrying_or_ending[policy], f"before-{policy}"
    retried = task.delay(key, 1, countdown=0, gate=key)
    until(lambda: of_key(recorder, key), "its first attempt runs")
    store, successor = store_of(combined.app), "a call that comes late"
    facts = Facts(successor, "another task")
    store.acquire(Claim(task.lock_key_for(key), successor, 3.0, facts=facts, succeeds="rerun", supersedes_for=60.0))
    recorder.open_gate(key)
    until(lambda: f"task_id={retried.id} holder={successor}" in worker.log(), "the retry has met it")
    store.unmark(task.lock_key_for(key), successor)

    assert retried.get(timeout=PROMPTLY) == 1
    assert retried.state == "SUCCESS"


@pytest.mark.parametrize("by", ["its policy", "a retry"])
def test_what_is_requeued_keeps_the_key_that_its_publisher_has_made(
    worker: Worker, recorder: Recorder, by: str
) -> None:
    task, key = combined.keyed_by_what_is_no_json, f"sent by {by}"
    if by == "a retry":
        first = task.delay((key,), retries=True)
        assert first.get(timeout=PROMPTLY) == 1
    else:
        with task.lock_for((key,)):
            refused = task.delay((key,))
            until(lambda: worker.log().count(f"[{refused.id}] received") > 1, "it is requeued")
        assert refused.get(timeout=PROMPTLY) == 0

    assert {event.facts["lock"] for event in of_key(recorder, key) if event.name == "enter"} == {
        task.lock_key_for((key,))
    }
    assert overlaps(of_key(recorder, key)) == []


def test_a_body_may_publish_a_call_that_counts_as_a_retry_without_its_task_id(worker: Worker) -> None:
    another = combined.published_by_hand.delay("by hand").get(timeout=PROMPTLY)

    assert combined.published_by_hand.AsyncResult(another).get(timeout=PROMPTLY) is None
