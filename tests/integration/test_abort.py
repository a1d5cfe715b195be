"""A body whose lease is lost is told so in the middle of its work; and no other code of its process is."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery, states

from celery_singleton_lock import LockLost, SingletonTask
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.integration.conftest import here, in_a_thread
from tests.tracing import traced

LONG = 15.0
"""Seconds for which a body would go on."""


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("abort", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_url="memory://abort", singleton_lock_ttl=1)
    yield app
    app.close()
    store: Any = store_of(app)
    store.clear()


def task_of(app: Celery, body: Callable[[Any], Any], **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name="sync", **options)
    def sync(self: Any, key: str = "k") -> Any:
        return body(self)

    return sync


def run(task: Any, *args: Any) -> Any:
    """As a worker does, in the thread that calls this; the result of it."""
    task_id, _ = traced(task, *args)
    return task.AsyncResult(task_id)


def lose(self: Any) -> None:
    """Somebody breaks the lease of a run that does not wait for it."""
    Inventory(store_of(self.app)).break_lock(self.lock.key, [self.lock.token], "alice", force=True)


def compute(seconds: float = LONG) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))


def computes(self: Any) -> None:
    lose(self)
    compute()


def starts_threads(self: Any) -> None:
    """Until a new thread runs, CPython takes it for the one that has started it, and may raise in it."""
    lose(self)
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        child = threading.Thread(target=int)
        child.start()
        child.join()


def waits_in_an_event_loop(self: Any) -> None:
    """In one long wait, which only its loop can end."""
    cleaned: list[bool] = []

    async def main() -> None:
        lose(self)
        try:
            await asyncio.sleep(LONG)
        finally:
            # It may take its time for that.
            await asyncio.sleep(0.2)
            cleaned.append(True)

    try:
        asyncio.run(main())
    finally:
        assert cleaned == [True]


@pytest.mark.parametrize("where", [here, in_a_thread])
@pytest.mark.parametrize("body", [computes, starts_threads, waits_in_an_event_loop])
def test_a_run_ends_as_lost_whatever_it_is_at(app: Celery, body: Callable[[Any], None], where: Any) -> None:
    task, began = task_of(app, body), time.monotonic()

    result = where(lambda: run(task))

    assert time.monotonic() - began < LONG - 5
    assert result.state == states.FAILURE
    with pytest.raises(LockLost, match="expired"):
        result.get()


@pytest.mark.parametrize("where", [here, in_a_thread])
def test_a_coroutine_that_swallows_its_cancellation_goes_on_and_the_log_says_so(
    app: Celery, where: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(self: Any) -> str:
        lose(self)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG)
        await asyncio.sleep(0.2)
        return "went on"

    task = task_of(app, lambda self: asyncio.run(main(self)))

    assert where(lambda: run(task)).get() == "went on"
    (told,) = [record for record in caplog.records if record.msg.startswith("lock.finished_without_lease")]
    assert told.levelname == "ERROR"


@pytest.mark.parametrize("where", [here, in_a_thread])
def test_a_body_may_catch_it_and_end_in_its_own_way(app: Celery, where: Any) -> None:
    caught: list[str] = []

    def body(self: Any) -> None:
        try:
            computes(self)
        except LockLost as error:
            caught.append(error.args[0])
            raise ValueError("its own way to say it") from error

    result = where(lambda: run(task_of(app, body)))

    assert caught == [app.tasks["sync"].lock_key_for("k")]
    with pytest.raises(ValueError, match="its own way"):
        result.get()


def test_nothing_reaches_the_runs_that_a_thread_has_after_it(app: Celery) -> None:
    # The bodies end at about the moment when they would be told.
    def body(self: Any, seconds: float) -> str:
        lose(self)
        compute(seconds)
        return "ran"

    seconds = iter([0.25 + 0.02 * number for number in range(8)])
    ends = task_of(app, lambda self: body(self, next(seconds)))

    @app.task(base=SingletonTask, name="after")
    def after() -> str:
        compute(0.02)
        return "ran"

    def series() -> list[str]:
        states_after = []
        for number in range(8):
            run(ends, str(number))
            states_after.append(run(after).state)
        return states_after

    assert in_a_thread(series) == [states.SUCCESS] * 8
