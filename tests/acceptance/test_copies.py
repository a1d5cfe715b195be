"""One message, one body: a message that is delivered again while its run lives, or after it has ended."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import forget_connections, one_worker
from tests.acceptance.redelivery import VISIBILITY, impatient, messages_of
from tests.recorder import Recorder, of_key, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker

pytestmark = pytest.mark.prove

# Long enough for a copy to come twice.
LONG = 2 * VISIBILITY + 2.0
IN_TIME = 30


valkey, worker = one_worker(10, TEST_VISIBILITY=str(VISIBILITY))


@pytest.fixture(scope="module")
def calls(valkey: Server, worker: Worker) -> Iterator[dict[str, Any]]:
    """A call of each kind, all at once, each with its name as its key, and each longer than its message is patient."""
    base = valkey.url.removesuffix("/0")
    combined.app.conf.update(broker_url=valkey.url, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    with impatient(combined.app):
        called = {name: task.apply_async((name, 1, LONG, None, name == "tracked")) for name, task in late_tasks()}
        yield called
    forget_connections(combined.app)


def late_tasks() -> list[tuple[str, Any]]:
    return list(combined.late.items())


def has_come_again(worker: Worker, result: Any) -> bool:
    """Celery has told of two deliveries at least."""
    return worker.log().count(f"[{result.id}] received") > 1


def is_over(valkey: Server, recorder: Recorder, key: str, result: Any, queue: str = "celery", most: int = 1) -> None:
    """Return once nothing more can come, or too much has."""
    looks = [0]

    def ended() -> bool:
        # A message on its way from the queue to a worker is in neither for a moment.
        looks[0] = 0 if messages_of(valkey, result.id, queue) else looks[0] + 1
        return looks[0] > 20 or len(of_key(recorder, key, "enter")) > most

    until(ended, "no message of it is left", timeout=IN_TIME)


@pytest.mark.parametrize("name", ["skip", "replace", "rerun", "two places"])
def test_a_copy_of_a_living_run_neither_runs_nor_ends_it(
    tasks: Any, calls: dict[str, Any], worker: Worker, recorder: Recorder, valkey: Server, name: str
) -> None:
    result = calls[name]

    assert result.get(timeout=IN_TIME) == 1
    is_over(valkey, recorder, name, result)

    assert has_come_again(worker, result)
    assert overlaps([event for event in recorder.events() if event.key == name]) == []
    assert [event.facts["number"] for event in of_key(recorder, name, "enter")] == [1]
    assert result.state == "SUCCESS"


def test_a_task_id_that_is_used_again_is_no_copy(tasks: Any, worker: Worker, recorder: Recorder) -> None:
    for number in (1, 2):
        combined.own_id.apply_async(("own", number), task_id="an id of one's own", countdown=0.3)
        until(lambda n=number: len(of_key(recorder, "own", "enter")) == n, f"call {number} runs", timeout=10)  # type: ignore[misc]

    assert [event.facts["number"] for event in of_key(recorder, "own", "enter")] == [1, 2]
