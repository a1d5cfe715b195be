"""A store that is away when a task wants its lock: no job is lost, none runs unlocked unasked."""

from collections.abc import Iterator

import pytest

from celery_singleton_lock import StoreError
from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers


@pytest.fixture
def store() -> Iterator[Server]:
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


def test_calls_of_a_key_that_is_held_here_end_as_lock_on_store_error_says(
    worker: Worker, store: Server, recorder: Recorder
) -> None:
    store.start()
    task = tasks.waiting_without_store
    holder = task.delay("k", gate="the end")
    until(lambda: recorder.events("enter"), "it runs")
    store.stop()
    for result in [task.delay("k", number) for number in range(4)]:
        with pytest.raises(StoreError, match=f"127.0.0.1:{store.port}"):
            result.get(timeout=30)
    recorder.open_gate("the end")
    holder.forget()
