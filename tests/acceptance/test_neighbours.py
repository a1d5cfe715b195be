"""R16: what others do to a message or a task changes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest

from celery_singleton_lock import LockHeld
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import one_valkey
from tests.recorder import Recorder, numbers, of_key, overlaps
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import Worker, workers

valkey = one_valkey()

# The publisher's agent writes a header of this name, which hides the others from a pool process.
HIDING = {"headers": {"headers": {"x-trace": "1"}, "tenant": "a"}}


@pytest.fixture(scope="module", params=["sentry", "newrelic", pytest.param("datadog", marks=pytest.mark.prove)])
def worker(request: pytest.FixtureRequest, valkey: Server) -> Iterator[Worker]:
    with workers("tests.acceptance.neighbour_app", {"TEST_NEIGHBOUR": request.param}, concurrency=4) as (worker,):
        yield worker


def running(recorder: Recorder, task: Any, key: str, *args: Any) -> Any:
    return recorder.begun(task.apply_async((key, *args), {"gate": key}, **HIDING))


def test_a_wait_ends_with_its_timeout_and_its_mark_with_it(worker: Worker, recorder: Recorder, key: str) -> None:
    task = combined.unique["reschedule"]
    holder = running(recorder, task, key)

    waiting = task.apply_async((key, 2), **HIDING)
    with pytest.raises(LockHeld):
        waiting.get(timeout=SOON)
    # Without a result, nobody but its mark can say that it has ended.
    silent = task.apply_async((key, 3), ignore_result=True, **HIDING)
    until(lambda: f"task_id={silent.id} holder={holder.id}" in worker.log(), "it has met the holder")
    until(lambda: f"{silent.id}] raised" in worker.log(), "it has ended")
    recorder.open_gate(key)

    assert holder.get(timeout=SOON) == 0
    until(lambda: not task.lock_holders(key), "the key is free")
    assert task.delay(key, 4).get(timeout=SOON) == 4


def test_the_newest_call_is_the_next_run(worker: Worker, recorder: Recorder, key: str) -> None:
    task = combined.by_policy["rerun"]
    running(recorder, task, key)
    later = [task.apply_async((key, number), **HIDING) for number in (1, 2, 3)]
    refused = [f"task_id={result.id} holder=" for result in later]
    until(lambda: all(line in worker.log() for line in refused), "all have come")
    recorder.open_gate(key)

    assert later[-1].get(timeout=SOON) == 3
    assert [result.get(timeout=SOON, propagate=False).reason for result in later[:2]] == ["superseded"] * 2
    assert numbers(recorder, key) == [0, 3]


def test_a_retry_gives_the_key_back(worker: Worker, recorder: Recorder, key: str) -> None:
    task = combined.retrying_unique
    retried = task.apply_async((key, 1, 5), **HIDING)
    until(lambda: retried.state == "RETRY", "it waits for its retry")
    until(lambda: not task.lock_holders(key), "its lock is free meanwhile", timeout=2.5)

    assert task.apply_async((key, 2), task_id=f"{key}-other", **HIDING).get(timeout=SOON) == 2
    assert retried.get(timeout=SOON) == 1
    assert overlaps(of_key(recorder, key)) == []
