"""Who holds a `Lock`: a thread or an asyncio task of one process; every way to leave gives back or says why not."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, uuid

from celery_singleton_lock import Lease, Lock, SingletonLockError, SingletonTask
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Holder
from tests.integration.test_lock import store_at
from tests.servers import Server
from tests.tracing import tracer_of


@pytest.fixture(params=["valkey", "memory"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        store_from_url("memory://owners").clear()  # type: ignore[attr-defined]
        return "memory://owners"
    server: Server = request.getfixturevalue("valkey")
    return server.url


def holders(url: str, lock: Lock) -> list[Holder]:
    return store_at(url).holders(lock.key)


def in_a_thread(body: Callable[[], Any]) -> Any:
    """What *body* returns, or the error it raises, in another thread."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(body())
        except SingletonLockError as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    return got[0]


# Without a `with` statement of its own.


# Another thread.


def test_a_block_that_another_thread_leaves_says_why_it_cannot(url: str) -> None:
    lock = Lock("stock", url=url)
    lease = lock.__enter__()

    error = in_a_thread(lambda: lock.__exit__(None, None, None))

    assert isinstance(error, SingletonLockError)
    for words in (lock.key, "not held by this thread", "lease.release()"):
        assert words in str(error)
    assert lease.held
    in_a_thread(lease.release)
    lock.__exit__(None, None, None)
    assert holders(url, lock) == []


# Twice, and nested.


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


# asyncio.


def test_tasks_that_share_one_object_give_back_their_own(url: str) -> None:
    lock, order = Lock("gates", url=url, limit=2), []

    async def body(name: str, entered: asyncio.Event, may_leave: asyncio.Event) -> None:
        with lock as lease:
            entered.set()
            await may_leave.wait()
            assert lease.held
            order.append(name)
        assert not lease.held

    async def run() -> None:
        first, second = (asyncio.Event(), asyncio.Event()), (asyncio.Event(), asyncio.Event())
        tasks = [asyncio.create_task(body("first", *first)), asyncio.create_task(body("second", *second))]
        await first[0].wait()
        await second[0].wait()
        # The one that came first leaves first.
        first[1].set()
        await tasks[0]
        assert len(holders(url, lock)) == 1
        second[1].set()
        await tasks[1]

    asyncio.run(run())
    assert order == ["first", "second"]
    assert holders(url, lock) == []


def test_another_task_does_not_re_enter(url: str) -> None:
    lock = Lock("stock", url=url, reentrant=True)

    async def try_it() -> Lease | None:
        return lock.acquire(blocking=False)

    async def run() -> None:
        with lock as lease:
            assert lock.acquire() is lease
            lock.release()
            assert await asyncio.create_task(try_it()) is None

    asyncio.run(run())
    assert holders(url, lock) == []


# In a task.


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_a_run_gives_back_the_locks_that_its_body_has_left(
    url: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("owners", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_url = url
    before, left = Lock("before", url=url), Lock("left", url=url)

    @app.task(base=SingletonTask, name="leaves")
    def leaves() -> None:
        left.acquire()
        if how == "raises":
            raise ValueError("before it was released")

    with before:
        sent = uuid()
        tracer_of(leaves)(sent, (), {}, {"id": sent, "args": (), "is_eager": False})

        assert holders(url, left) == []
        assert len(holders(url, before)) == 1
    (told,) = [record for record in caplog.records if record.msg.startswith("lock.left_held")]
    assert told.getMessage().startswith(f"lock.left_held key={left.key} task_id={sent}: ")
    app.close()


# Of any length, and any text.
