"""The store in memory in a worker of one process is as good as any; test_start.py has those of several."""

import pytest

from tests.acceptance import app as tasks
from tests.recorder import Recorder, overlaps
from tests.waiting import until
from tests.workers import workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.app"


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_a_worker_of_one_process_locks_in_memory(recorder: Recorder, pool: str) -> None:
    with workers(APP, {"TEST_LOCKS": "memory://"}, pool=pool, concurrency=4):
        results = [tasks.rescheduled.delay("k", number, 0.3) for number in range(3)]
        until(lambda: all(result.ready() for result in results), "all have run", timeout=60)

    assert [result.get() for result in results] == [0, 1, 2]
    assert overlaps(recorder.events()) == []
