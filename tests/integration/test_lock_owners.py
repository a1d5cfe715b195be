"""A `Lock` is held by a block, a thread or an asyncio task; every way to leave gives it back."""

import asyncio
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import Lease, Lock, SingletonLockError, SingletonTask
from celery_singleton_lock.stores.records import Holder
from tests.integration.conftest import here, in_a_thread
from tests.integration.test_lock import store_at
from tests.tracing import traced
from tests.waiting import until


def holders(url: str, lock: Lock) -> list[Holder]:
    return store_at(url).holders(lock.key)


def in_a_context(body: Callable[[], Any]) -> Any:
    return copy_context().run(body)


ways = pytest.mark.parametrize("way", [here, in_a_context, in_a_thread])


def without_a_frame(body: Callable[[], Any]) -> None:
    """As a greenlet that begins with it."""
    start_new_thread(body, ())


@pytest.mark.parametrize("way", [here, in_a_context, in_a_thread, without_a_frame])
@pytest.mark.parametrize("entered", [in_a_context, in_a_thread])
def test_a_block_is_left_wherever_its_end_is(url: str, entered: Any, way: Any) -> None:
    lock, served = Lock("stock", url=url), []

    def wait() -> None:
        with lock:
            served.append("waiter")

    lease = entered(lock.__enter__)
    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    until(lambda: store_at(url).survey([lock.key])[0].waiting == 1, "it waits")
    way(partial(lock.__exit__, None, None, None))

    until(lambda: served, "the waiter has it")
    waiter.join(20)
    assert not lease.held
    assert holders(url, lock) == []
    with pytest.raises(SingletonLockError, match="was left already"):
        lock.__exit__(None, None, None)


def dependency(lock: Lock) -> Iterator[Lease]:
    """As FastAPI's: each step may come in another context, and in another thread."""
    with lock as lease:
        yield lease


@ways
def test_each_stack_releases_what_it_has_taken(url: str, way: Any) -> None:
    lock = Lock("gates", url=url, limit=3)
    with ExitStack() as first, ExitStack() as second:
        one, two = first.enter_context(lock), second.enter_context(lock)
        again = first.enter_context(lock)

        way(first.close)
        assert (one.held, two.held, again.held) == (False, True, False)
    assert not two.held

    async def in_a_loop() -> None:
        async with AsyncExitStack() as first, AsyncExitStack() as second:
            one, two = await first.enter_async_context(lock), await second.enter_async_context(lock)
            await first.aclose()
            assert (one.held, two.held) == (False, True)

    asyncio.run(in_a_loop())
    assert holders(url, lock) == []


def test_the_blocks_of_a_reentrant_lock_end_in_any_order(url: str) -> None:
    lock = Lock("stock", url=url, reentrant=True)
    first, second = dependency(lock), dependency(lock)
    lease = next(first)

    assert next(second) is lease
    first.close()
    assert lease.held
    second.close()
    assert holders(url, lock) == []


def test_a_block_gives_back_what_it_has_taken_and_nothing_else(url: str) -> None:
    lock = Lock("gates", url=url, limit=3)

    with lock as mine:
        other = lock.acquire()
        assert other is not None
    assert not mine.held
    assert other.held

    with lock as outer, lock as inner:
        outer.release()
    assert not inner.held
    lock.release()
    assert holders(url, lock) == []


def by_the_lock(lock: Lock, lease: Lease) -> None:
    lock.release()


def by_the_lease(lock: Lock, lease: Lease) -> None:
    lease.release()


@pytest.mark.parametrize("first", [by_the_lock, by_the_lease])
@pytest.mark.parametrize("second", [by_the_lock, by_the_lease])
def test_a_reentrant_lease_is_given_back_as_often_as_taken(
    url: str, first: Callable[[Lock, Lease], None], second: Callable[[Lock, Lease], None]
) -> None:
    lock = Lock("stock", url=url, reentrant=True)
    lease = lock.acquire()
    assert lease is not None
    assert lock.acquire() is lease

    first(lock, lease)
    assert lease.held
    assert len(holders(url, lock)) == 1
    second(lock, lease)
    assert not lease.held
    assert holders(url, lock) == []


@pytest.mark.parametrize("wait", [Lock.__enter__, Lock.acquire, partial(Lock.acquire, timeout=60)])
def test_a_wait_that_would_block_an_event_loop_is_an_error_that_says_what_to_do(url: str, wait: Any) -> None:
    lock, other = Lock("stock", url=url), Lock("stock", url=url)

    async def ask() -> str:
        assert other.acquire(blocking=False) is None
        assert other.acquire(timeout=0) is None
        with Lock("free", url=url) as lease:
            assert lease.held
        try:
            return f"taken: {wait(other)}"
        except SingletonLockError as error:
            return str(error)

    with lock:
        told = in_a_thread(lambda: asyncio.run(ask()))
        assert store_at(url).survey([lock.key])[0].waiting == 0
    assert lock.key in told
    assert "async with lock" in told


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    app = Celery("owners", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_url = url
    yield app
    app.close()


@pytest.mark.parametrize("how", ["returns", "raises", "takes it twice"])
def test_a_run_gives_back_the_locks_that_its_body_has_left(
    app: Celery, url: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, left = Lock("before", url=url), Lock("left", url=url, reentrant=how == "takes it twice")

    @app.task(base=SingletonTask, name="leaves")
    def leaves() -> None:
        kept.append(left.acquire())
        if how == "takes it twice":
            kept.append(left.acquire())
        if how == "raises":
            raise ValueError("before it was released")

    kept: list[Any] = []
    with before:
        sent, _ = traced(leaves)

        assert kept
        assert holders(url, left) == []
        assert len(holders(url, before)) == 1
    told = [record.getMessage() for record in caplog.records if record.msg.startswith("lock.left_held")]
    assert [each.startswith(f"lock.left_held key={left.key} task_id={sent}: ") for each in told] == [True] * len(kept)
