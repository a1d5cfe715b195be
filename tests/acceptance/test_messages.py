"""Messages of every kind: items of maps, retries, and messages and headers of a later version or of nobody."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim
from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import one_worker
from tests.recorder import Recorder, of_key, overlaps
from tests.waiting import SOON, until
from tests.workers import Worker

HEADER = "singleton_lock"
LATER = {"tenant": {"name": "north", "zones": [1, None]}, "weight": 0}

valkey, worker = one_worker(4, autouse=True)


@pytest.fixture
def held(recorder: Recorder) -> Iterator[Any]:
    gates = []

    def begins(task: Any, key: str) -> None:
        gates.append(key)
        recorder.begun(task.delay(key, 0, 0.0, key))

    yield begins
    for gate in gates:
        recorder.open_gate(gate)


FORMS = {
    "map": lambda task, key: task.map([key, key, key]),
    "starmap": lambda task, key: task.starmap([(key, 1), (key, 2), (key, 3)]),
    "chunks": lambda task, key: task.chunks([(key, 1), (key, 2), (key, 3)], 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_items_of_two_maps_with_one_key_never_run_at_once(recorder: Recorder, form: str) -> None:
    key = f"two-{form}"
    maps = [FORMS[form](combined.mapped["reschedule"], key).apply_async() for _ in range(2)]
    for result in maps:
        result.get(timeout=SOON)

    assert len([event for event in of_key(recorder, key) if event.name == "enter"]) == 6
    assert overlaps(of_key(recorder, key)) == []


@pytest.mark.parametrize("form", FORMS)
def test_an_item_that_is_skipped_has_no_result(held: Any, form: str) -> None:
    key = f"skipped-{form}"
    held(combined.mapped["skip"], key)

    expected = [None, None, None]
    assert FORMS[form](combined.mapped["skip"], key).apply_async().get(timeout=SOON) in (expected, [expected])


def test_a_task_that_an_item_calls_directly_is_no_item(held: Any) -> None:
    held(combined.mapped["skip"], "called")

    # The key of the task that is called is held, and a direct call takes no lock.
    assert combined.calls_directly.starmap([("called", 5)]).apply_async().get(timeout=SOON) == [5]


@pytest.mark.prove
def test_an_item_that_is_replaced_has_no_result_and_its_map_goes_on(recorder: Recorder) -> None:
    task, key = combined.mapped["replace"], "replaced-item"
    items = task.starmap([(key, 1, 30), (f"{key} next", 2)]).apply_async()
    until(lambda: of_key(recorder, key), "the item runs")

    assert task.delay(key, 3).get(timeout=SOON) == 3
    assert items.get(timeout=SOON) == [None, 2]


def test_an_item_that_asks_for_a_retry_keeps_no_lease(recorder: Recorder) -> None:
    task = combined.keyed["while_executing"]
    task.starmap([(71, 72)]).apply_async()
    until(lambda: [each for each in of_key(recorder, "71") if each.name == "leave"], "the item has asked")

    # A lease that is left would be renewed for as long as its process lives.
    until(lambda: not task.lock_holders(71), "its key is free", timeout=SOON)


@pytest.mark.parametrize("mode", ["until_executed", "until_and_while_executing"])
def test_a_retry_with_other_arguments_runs_under_their_key(recorder: Recorder, mode: str) -> None:
    task, old, new = combined.retrying_by_mode[mode], f"old-{mode}", f"new-{mode}"

    assert task.delay(old, 1, countdown=0, key_of_retry=new).get(timeout=SOON) == 1

    held = {event.key: event.facts["lock"] for event in recorder.events("enter") if event.key in (old, new)}
    assert held == {old: task.lock_key_for(old), new: task.lock_key_for(new)}


@pytest.mark.parametrize("mode", ["until_executed", "until_and_while_executing"])
def test_a_retry_with_other_arguments_does_not_run_beside_their_call(
    worker: Worker, recorder: Recorder, mode: str
) -> None:
    task, old, new = combined.retrying_by_mode[mode], f"from-{mode}", f"to-{mode}"
    other = recorder.begun(task.delay(new, 1, gate=new))

    retried = task.delay(old, 2, countdown=0, key_of_retry=new)
    has_met = f"task_id={retried.id} holder="
    until(lambda: has_met in worker.log() or len(of_key(recorder, new)) > 1, "the retry has come")
    recorder.open_gate(new)

    assert (other.get(timeout=SOON), retried.get(timeout=SOON)) == (1, 2)
    assert overlaps(of_key(recorder, new)) == []


@pytest.mark.parametrize("policy", combined.retrying_or_ending)
def test_a_retry_does_not_end_for_a_successor_that_has_yet_to_come(
    worker: Worker, recorder: Recorder, policy: str
) -> None:
    task, key = combined.retrying_or_ending[policy], f"before-{policy}"
    retried = recorder.begun(task.delay(key, 1, countdown=0, gate=key))
    store, successor = store_of(combined.app), "a call that comes late"
    claim = Claim(task.lock_key_for(key), successor, 3.0, task_id=successor, task_name="another task")
    store.acquire(replace(claim, succeeds="rerun", supersedes_for=60.0))
    recorder.open_gate(key)
    until(lambda: f"task_id={retried.id} holder={successor}" in worker.log(), "the retry has met it")
    store.unmark(task.lock_key_for(key), successor)

    assert retried.get(timeout=SOON) == 1
    assert retried.state == "SUCCESS"


@pytest.mark.parametrize("by", ["its policy", "a retry"])
def test_what_is_requeued_keeps_the_key_that_its_publisher_has_made(
    worker: Worker, recorder: Recorder, by: str
) -> None:
    task, key = combined.keyed_by_what_is_no_json, f"sent by {by}"
    if by == "a retry":
        first = task.delay((key,), retries=True)
        assert first.get(timeout=SOON) == 1
    else:
        with task.lock_for((key,)):
            refused = task.delay((key,))
            until(lambda: worker.log().count(f"[{refused.id}] received") > 1, "it is requeued")
        assert refused.get(timeout=SOON) == 0

    assert {event.facts["lock"] for event in of_key(recorder, key) if event.name == "enter"} == {
        task.lock_key_for((key,))
    }
    assert overlaps(of_key(recorder, key)) == []


def test_a_body_may_publish_a_call_that_counts_as_a_retry_without_its_task_id() -> None:
    another = combined.published_by_hand.delay("by hand").get(timeout=SOON)

    assert combined.published_by_hand.AsyncResult(another).get(timeout=SOON) is None


def of_a_later_version(**notes: Any) -> dict[str, Any]:
    # Later than the holder, whose publisher went by the store's clock as it is known here.
    return {HEADER: {"published": time.time_ns() // 1000 + 10_000_000, **LATER, **notes}}


def later_notes(event: Any) -> dict[str, Any]:
    return {name: value for name, value in event.facts["notes"].items() if name in LATER}


@pytest.mark.parametrize("policy", ["reschedule", "rerun", "replace"])
def test_a_message_of_a_later_version_runs_with_all_its_notes(worker: Worker, recorder: Recorder, policy: str) -> None:
    task, key = tasks.by_policy[policy], f"later-{policy}"
    recorder.begun(task.delay(key, 0, gate=key))
    result = tasks.app.send_task(task.name, (key, 1), headers=of_a_later_version())
    until(lambda: f"task_id={result.id}" in worker.log(), "it is refused")
    recorder.open_gate(key)

    assert result.get(timeout=SOON) == 1
    assert later_notes(of_key(recorder, key, "enter")[-1]) == LATER


def test_a_retry_keeps_the_notes_of_a_later_version(recorder: Recorder) -> None:
    task, key = tasks.rerun_and_retried, "later-retried"
    result = tasks.app.send_task(task.name, (key, 1), {"countdown": 0}, headers=of_a_later_version())

    assert result.get(timeout=SOON) == 1
    assert [later_notes(event) for event in of_key(recorder, key, "enter")] == [LATER, LATER]


@pytest.mark.parametrize(
    "header",
    [
        "mine",
        True,
        1.5,
        ["k"],
        [{"key": "k"}],
        {"key": None},
        {"key": {"deep": [1]}},
        {"tries": True, **LATER},
        {"origin": ["k", 1]},
    ],
    ids=str,
)
def test_a_header_that_no_version_writes_fails_its_own_call_alone(header: Any) -> None:
    task, key = tasks.by_policy["reschedule"], f"strange-{header}"

    with pytest.raises(ConfigurationError, match="give a header of your own another name"):
        tasks.app.send_task(task.name, (key,), headers={HEADER: header}).get(timeout=SOON)
    assert task.delay(key, 1).get(timeout=SOON) == 1
