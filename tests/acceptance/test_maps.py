"""The items of maps, starmaps and chunks are calls like others."""

from collections.abc import Iterator
from typing import Any

import pytest

from celery_singleton_lock import LockHeld
from tests.acceptance import combined_app as combined
from tests.gates import open_gate
from tests.recorder import Event, Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

APP = "tests.acceptance.combined_app"
PROMPTLY = 15


@pytest.fixture(scope="module")
def valkey(valkey_process: Server) -> Server:
    with valkey_process.client() as client:
        client.flushall()
    return valkey_process


@pytest.fixture(scope="module", autouse=True)
def _worker(valkey: Server) -> Iterator[None]:
    with workers(APP, {"TEST_STORE": valkey.url, "C_FORCE_ROOT": "1"}, 1, concurrency=4):
        yield


def of_key(recorder: Recorder, key: str) -> list[Event]:
    return [event for event in recorder.events() if event.key == key]


@pytest.fixture
def held(recorder: Recorder) -> Iterator[Any]:
    """Begins a run that holds its key until the test ends, or for so many seconds."""
    gates = []

    def begins(task: Any, key: str, seconds: float | None = None) -> Any:
        gates.append(key)
        result = task.delay(key, 0, seconds or 0, None if seconds else key)
        until(lambda: of_key(recorder, key), "it runs")
        return result

    yield begins
    for gate in gates:
        open_gate(recorder, gate)


FORMS = {
    "map": lambda task, key: task.map([key, key, key]),
    "starmap": lambda task, key: task.starmap([(key, 1), (key, 2), (key, 3)]),
    "chunks": lambda task, key: task.chunks([(key, 1), (key, 2), (key, 3)], 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_items_of_two_maps_with_one_key_never_run_at_once(tasks: Any, recorder: Recorder, form: str) -> None:
    key = f"two-{form}"
    maps = [FORMS[form](combined.mapped["reschedule"], key).apply_async() for _ in range(2)]
    for result in maps:
        result.get(timeout=PROMPTLY)

    assert len([event for event in of_key(recorder, key) if event.name == "enter"]) == 6
    assert overlaps(of_key(recorder, key)) == []


@pytest.mark.parametrize("form", FORMS)
def test_an_item_that_is_skipped_has_no_result(tasks: Any, held: Any, form: str) -> None:
    key = f"skipped-{form}"
    held(combined.mapped["skip"], key)

    expected = [None, None, None]
    assert FORMS[form](combined.mapped["skip"], key).apply_async().get(timeout=PROMPTLY) in (expected, [expected])


def test_an_item_that_is_skipped_has_the_result_that_its_task_says(tasks: Any, held: Any) -> None:
    task, key = combined.mapped_with_result, "with-result"
    held(task, key)

    assert task.map([key, "free"]).apply_async().get(timeout=PROMPTLY) == ["skipped", "ran"]


def test_an_item_that_is_refused_fails_its_map(tasks: Any, held: Any) -> None:
    task, key = combined.mapped["raise"], "refused"
    holder = held(task, key)

    with pytest.raises(LockHeld, match=holder.id):
        task.map([key]).apply_async().get(timeout=PROMPTLY)


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["reschedule", "wait", "join", "rerun", "replace"])
def test_an_item_that_may_wait_waits_its_turn(tasks: Any, recorder: Recorder, held: Any, policy: str) -> None:
    task, key = combined.mapped[policy], f"waits-{policy}"
    holder = held(task, key, 1.5)

    assert task.map([key, key]).apply_async().get(timeout=PROMPTLY) == ["ran", "ran"]
    holder.get(timeout=PROMPTLY, propagate=False)
    assert overlaps(of_key(recorder, key)) == []


@pytest.mark.prove
def test_an_item_that_is_replaced_has_no_result_and_its_map_goes_on(tasks: Any, recorder: Recorder) -> None:
    task, key = combined.mapped["replace"], "replaced-item"
    items = task.starmap([(key, 1, 30), (f"{key} next", 2)]).apply_async()
    until(lambda: of_key(recorder, key), "the item runs")

    assert task.delay(key, 3).get(timeout=PROMPTLY) == "ran"
    assert items.get(timeout=PROMPTLY) == [None, "ran"]


@pytest.mark.prove
def test_who_joins_an_item_ends_with_a_result_of_its_own(tasks: Any, recorder: Recorder) -> None:
    task, key = combined.mapped["join"], "joined-item"
    items = task.starmap([(key, 1, 0, key), ("free", 2)]).apply_async()
    until(lambda: of_key(recorder, key), "the item runs")
    joiner = task.delay(key, 3)
    until(lambda: joiner.state == "RETRY", "it has joined")
    open_gate(recorder, key)

    assert joiner.get(timeout=PROMPTLY) == "ran"
    assert items.get(timeout=PROMPTLY) == ["ran", "ran"]
