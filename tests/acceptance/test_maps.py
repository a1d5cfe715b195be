"""The items of maps, starmaps and chunks are calls like others."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import one_worker
from tests.recorder import Recorder, of_key, overlaps
from tests.waiting import until

PROMPTLY = 40


valkey, worker = one_worker(4, autouse=True)


@pytest.fixture
def held(recorder: Recorder) -> Iterator[Any]:
    gates = []

    def begins(task: Any, key: str) -> None:
        gates.append(key)
        task.delay(key, 0, 0.0, key)
        until(lambda: of_key(recorder, key), "it runs")

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
        result.get(timeout=PROMPTLY)

    assert len([event for event in of_key(recorder, key) if event.name == "enter"]) == 6
    assert overlaps(of_key(recorder, key)) == []


@pytest.mark.parametrize("form", FORMS)
def test_an_item_that_is_skipped_has_no_result(held: Any, form: str) -> None:
    key = f"skipped-{form}"
    held(combined.mapped["skip"], key)

    expected = [None, None, None]
    assert FORMS[form](combined.mapped["skip"], key).apply_async().get(timeout=PROMPTLY) in (expected, [expected])


def test_a_task_that_an_item_calls_directly_is_no_item(held: Any) -> None:
    held(combined.mapped["skip"], "called")

    # The key of the task that is called is held, and a direct call takes no lock.
    assert combined.calls_directly.starmap([("called", 5)]).apply_async().get(timeout=PROMPTLY) == [5]


@pytest.mark.prove
def test_an_item_that_is_replaced_has_no_result_and_its_map_goes_on(recorder: Recorder) -> None:
    task, key = combined.mapped["replace"], "replaced-item"
    items = task.starmap([(key, 1, 30), (f"{key} next", 2)]).apply_async()
    until(lambda: of_key(recorder, key), "the item runs")

    assert task.delay(key, 3).get(timeout=PROMPTLY) == 3
    assert items.get(timeout=PROMPTLY) == [None, 2]


def test_an_item_that_asks_for_a_retry_keeps_no_lease(recorder: Recorder) -> None:
    task = combined.keyed["while_executing"]
    task.starmap([(71, 72)]).apply_async()
    until(lambda: [each for each in of_key(recorder, "71") if each.name == "leave"], "the item has asked")

    # A lease that is left would be renewed for as long as its process lives.
    until(lambda: not task.lock_holders(71), "its key is free", timeout=PROMPTLY)
