"""The store in memory in a worker: refused if the pool has several processes, as good as any if it has one."""

from typing import Any

import pytest

from tests.recorder import Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.app"


@pytest.fixture
def in_memory(env: dict[str, str]) -> dict[str, str]:
    return {**env, "TEST_LOCKS": "memory://"}


def test_a_worker_with_several_processes_is_refused_before_its_pool_starts(in_memory: dict[str, str]) -> None:
    worker = Worker(APP, in_memory, pool="prefork").start()
    try:
        until(lambda: worker._died() or " ready." in worker.log(), "it is refused, or ready", timeout=60)
        assert worker._died()
        assert worker.wait() != 0
        log = worker.log()
    finally:
        worker.close()

    (line,) = [line for line in log.splitlines() if "lock.misconfigured: " in line]
    for words in ("singleton_lock_url='memory://'", "'prefork'", "'redis://localhost:6379/0'", "--pool threads"):
        assert words in line


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_a_worker_of_one_process_locks_in_memory(
    in_memory: dict[str, str], tasks: Any, recorder: Recorder, valkey: Server, pool: str
) -> None:
    with workers(APP, in_memory, pool=pool, concurrency=4):
        results = [tasks.rescheduled.delay("k", number, 0.3) for number in range(3)]
        until(lambda: all(result.ready() for result in results), "all have run", timeout=60)

    assert [result.get() for result in results] == [0, 1, 2]
    assert overlaps(recorder.events()) == []
