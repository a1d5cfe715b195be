"""A store that is away when a task wants its lock: no job is lost, none runs unlocked unasked."""

from collections.abc import Iterator

import pytest

from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers


@pytest.fixture
def store() -> Iterator[Server]:
    """A store of locks that is not running yet."""
    server = Server("valkey")
    yield server
    server.close()


@pytest.fixture
def worker(store: Server) -> Iterator[Worker]:
    with workers(APP, {"TEST_LOCKS": store.url}) as (worker,):
        yield worker


def test_the_job_is_requeued_until_the_store_is_back(worker: Worker, store: Server, recorder: Recorder) -> None:
    result = tasks.skipped.delay("k")
    until(lambda: "lock.unanswered" in worker.log(), "the task has noticed")
    store.start()

    assert result.get(timeout=30) == "ran"
    assert len(recorder.events("enter")) == 1
