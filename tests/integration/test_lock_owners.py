"""Who holds a `Lock`: a thread or an asyncio task of one process; every way to leave gives back or says why not."""

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, uuid

from celery_singleton_lock import ConfigurationError, Lease, Lock, SingletonLockError, SingletonTask
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Holder
from tests.forks import in_a_fork
from tests.integration.test_lock import store_at
from tests.servers import Server
from tests.tracing import tracer_of
from tests.waiting import until


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


def test_an_exit_stack_keeps_a_block_until_it_leaves_it(url: str) -> None:
    lock = Lock("stock", url=url)

    with ExitStack() as stack:
        stack.enter_context(lock)
        gc.collect()
        assert holders(url, lock) != []
        with Lock("another", url=url):
            assert holders(url, lock) != []

    assert holders(url, lock) == []


def test_what_was_acquired_by_hand_is_kept_by_the_lock(url: str) -> None:
    lock = Lock("stock", url=url)
    lock.acquire()
    gc.collect()

    assert holders(url, lock) != []
    lock.release()
    assert holders(url, lock) == []


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


def test_a_generator_that_another_thread_ends_says_so(url: str) -> None:
    lock = Lock("stock", url=url)

    def working() -> Iterator[Lease]:
        with lock as lease:
            yield lease

    work = working()
    lease = next(work)

    assert "cannot be left here" in str(in_a_thread(work.close))
    lease.release()
    assert holders(url, lock) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_that_leaves_the_block_says_so_and_frees_nothing(valkey: Server) -> None:
    lock = Lock("stock", url=valkey.url)

    with lock as lease:
        assert "not held by this thread, asyncio task or process" in in_a_fork(lambda: lock.__exit__(None, None, None))
        assert str(os.getpid()) in in_a_fork(lease.release)
        assert len(holders(valkey.url, lock)) == 1
    assert holders(valkey.url, lock) == []


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


def test_a_block_left_twice_says_so(url: str) -> None:
    lock = Lock("stock", url=url)
    with lock:
        pass

    with pytest.raises(SingletonLockError, match="cannot be left here"):
        lock.__exit__(None, None, None)


def test_a_lease_that_was_given_back_by_its_own_door_is_not_given_back_by_the_lock(url: str) -> None:
    lock = Lock("stock", url=url)

    for _ in range(3):
        lease = lock.acquire()
        assert lease is not None
        lease.release()

    with pytest.raises(SingletonLockError, match="not held by this thread"):
        lock.release()


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


@pytest.mark.parametrize("give_back", [by_the_lock, by_the_lease])
def test_an_inner_block_does_not_free_the_lock_under_the_outer_one(
    url: str, give_back: Callable[[Lock, Lease], None]
) -> None:
    lock = Lock("stock", url=url, reentrant=True)

    with lock as outer:
        with lock as inner:
            give_back(lock, inner)
        assert outer.held
        assert len(holders(url, lock)) == 1
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


def test_what_a_thread_took_for_a_task_is_given_back_by_the_lease(url: str) -> None:
    lock = Lock("stock", url=url)

    async def run() -> str:
        lease = await asyncio.to_thread(lock.acquire, timeout=5)
        assert lease is not None
        with pytest.raises(SingletonLockError) as refused:
            lock.release()
        assert lease.held
        await asyncio.to_thread(lease.release)
        return str(refused.value)

    assert "lease.release()" in asyncio.run(run())
    assert holders(url, lock) == []


def test_what_a_thread_took_for_a_task_that_is_gone_ends_by_its_ttl(url: str) -> None:
    lock = Lock("stock", url=url, ttl=1)

    async def run() -> None:
        await asyncio.to_thread(lock.acquire, timeout=5)

    asyncio.run(run())

    until(lambda: holders(url, lock) == [], "nobody has renewed it", timeout=4)


def test_what_was_acquired_before_a_task_began_is_not_that_tasks(url: str) -> None:
    lock = Lock("stock", url=url)

    async def leave() -> str:
        with pytest.raises(SingletonLockError) as refused:
            lock.release()
        return str(refused.value)

    async def run() -> str:
        lock.acquire()
        return await asyncio.create_task(leave())

    assert "not held by this thread, asyncio task" in asyncio.run(run())


def test_two_objects_in_one_thread_do_not_disturb_each_other(url: str) -> None:
    one, other = Lock("stock", url=url, reentrant=True), Lock("gates", url=url, limit=2)

    with one as lease, other:
        one.acquire()
        second = other.acquire()
        assert second is not None
        one.release()
        assert (len(holders(url, one)), len(holders(url, other))) == (1, 2)
        assert lease.held
    assert (holders(url, one), len(holders(url, other))) == ([], 1)
    with pytest.raises(SingletonLockError, match="not held by this thread"):
        one.release()
    other.release()
    assert holders(url, other) == []


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
    (told,) = [record for record in caplog.records if record.msg.startswith("lock.left")]
    assert told.getMessage().startswith(f"lock.left key={left.key} task_id={sent}: ")
    app.close()


# Of any length, and any text.


@pytest.mark.parametrize("ttl", [30 * 24 * 3600, timedelta(days=365 * 90)])
def test_a_waiter_may_wait_for_years(url: str, ttl: Any) -> None:
    lock, got = Lock("stock", url=url, ttl=ttl), []
    lease = lock.acquire()
    assert lease is not None

    def wait() -> None:
        got.append(Lock("stock", url=url, ttl=ttl).acquire(timeout=90 * 24 * 3600.0))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    until(lambda: waiting(url, lock), "it queues")
    lock.release()

    until(lambda: got, "it is served")
    assert got[0].remaining() > 29 * 24 * 3600
    got[0].release()


def waiting(url: str, lock: Lock) -> bool:
    """Somebody is in the queue: then the key is not free at once after a release."""
    return store_at(url).survey([lock.key])[0].waiters == 1


@pytest.mark.parametrize("ttl", [1e11, 1e300, timedelta.max])
def test_a_ttl_that_no_server_can_count_to_is_refused(ttl: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ttl=.* is not allowed"):
        Lock("stock", url="memory://", ttl=ttl)


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb", "näme", "名", "\x00", "a b\r\n", "%ED%A0%80", "{}"])
def test_a_name_may_be_any_text(url: str, name: str) -> None:
    names = [name, "\ud801", "%ED%A0%81"]
    locks = [Lock(each, url=url) for each in names]

    for lock in locks:
        assert lock.acquire(blocking=False) is not None
    for lock in locks:
        assert len(holders(url, lock)) == 1
        lock.release()
