"""`async with lock`: a lock in coroutines, which blocks no event loop, and of which a cancellation leaves nothing."""

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from weakref import ref

import anyio
import pytest
import uvloop

from celery_singleton_lock import Lease, Lock, SingletonLockError, StoreError
from tests.forks import in_a_fork
from tests.proxy import Proxy
from tests.servers import Server, running
from tests.waiting import until

Run = Callable[[Coroutine[Any, Any, Any]], Any]
SOON = 30.0


# uvicorn takes uvloop, so `make test` has it in tests/frameworks.
@pytest.fixture(
    params=[
        pytest.param(asyncio.new_event_loop, id="asyncio"),
        pytest.param(uvloop.new_event_loop, id="uvloop", marks=pytest.mark.prove),
    ]
)
def run(request: pytest.FixtureRequest) -> Run:

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(main, 2 * SOON))

    return run


async def become(condition: Callable[[], Any], what: str) -> Any:
    return await asyncio.to_thread(until, condition, what, SOON)


def waiters(lock: Lock) -> int:
    return int(lock.state().waiting)


def nothing_is_left(lock: Lock) -> bool:
    state = lock.state()
    return not state.holders and not state.waiting


@pytest.fixture
def lock(url: str) -> Iterator[Lock]:
    lock = Lock("stock", url=url)
    yield lock
    assert nothing_is_left(lock)


def test_acquire_and_release(lock: Lock, run: Run) -> None:
    async def main() -> None:
        lease = await lock.aacquire()
        assert await lock.aacquire(timeout=0) is None
        assert await lock.aacquire(timeout=0.2) is None
        # In any task.
        await asyncio.create_task(lease.arelease())
        assert not lease.held
        with pytest.raises(SingletonLockError, match="released already"):
            await lease.arelease()

    run(main())


def test_a_release_wakes_the_next_one_in_the_order_of_their_arrival(lock: Lock, url: str, run: Run) -> None:
    order = list[str]()

    async def wait(name: str) -> None:
        async with Lock("stock", url=url):
            order.append(name)

    def wait_in_a_thread() -> None:
        with Lock("stock", url=url):
            order.append("thread")

    async def main() -> float:
        thread = threading.Thread(target=wait_in_a_thread)
        async with asyncio.TaskGroup() as group:
            async with lock:
                for number in range(6):
                    group.create_task(wait(str(number)))
                    await become(lambda number=number: waiters(lock) == number + 1, "it is queued")
                thread.start()
                await become(lambda: waiters(lock) == 7, "the thread is queued")
                group.create_task(wait("last"))
                await become(lambda: waiters(lock) == 8, "it is queued")
            began = time.monotonic()
        await asyncio.to_thread(thread.join)
        return time.monotonic() - began

    # Far less than a lease lasts, so nobody has waited for its end.
    assert run(main()) < 15
    assert order == [*map(str, range(6)), "thread", "last"]


def test_hundreds_wait_on_one_connection_and_the_loop_goes_on(valkey: Server, run: Run) -> None:
    lock, inside = Lock("stock", url=valkey.url), list[int]()
    crowd = 300

    async def wait() -> None:
        async with lock:
            inside.append(1)
            assert len(inside) == 1
            await asyncio.sleep(0)
            inside.pop()

    def listening() -> set[str]:
        with valkey.client() as client:
            return {each["id"] for each in client.client_list(_type="pubsub")}

    async def main() -> tuple[set[str], int]:
        threads = threading.active_count()
        # The listener of another test lingers for some seconds.
        before = listening()
        async with asyncio.TaskGroup() as group, lock:
            for _ in range(crowd):
                group.create_task(wait())
            await become(lambda: waiters(lock) == crowd, "all are queued")
            return listening() - before, threading.active_count() - threads

    new, threads = run(main())
    assert len(new) <= 1
    # Those that ask the store, that of the listener, that of the heartbeat and one of this test.
    assert threads < 16
    assert nothing_is_left(lock)


def test_the_task_that_holds_it_may_acquire_it_again_and_no_other(url: str, run: Run) -> None:
    lock = Lock("stock", url=url, reentrant=True)

    async def main() -> None:
        async with lock as lease:
            async with lock as again:
                assert again is lease
                assert await asyncio.create_task(lock.aacquire(timeout=0)) is None
            assert lease.held

    run(main())
    assert nothing_is_left(lock)


def test_a_block_of_a_generator_ends_in_any_task(lock: Lock, run: Run) -> None:
    async def steps() -> AsyncIterator[Lease]:
        async with lock as lease:
            yield lease

    async def main() -> None:
        held = steps()
        lease = await asyncio.create_task(anext(held))  # type: ignore[arg-type, var-annotated]
        assert lease.held
        await asyncio.create_task(held.aclose())  # type: ignore[attr-defined]
        assert not lease.held
        async with lock:
            pass

    run(main())


def test_whenever_a_task_is_cancelled_nothing_is_held(lock: Lock, run: Run) -> None:
    chance = random.Random(3)

    async def hold(seconds: float) -> None:
        async with lock:
            await asyncio.sleep(seconds)

    async def main() -> None:
        for _ in range(25):
            tasks = [asyncio.create_task(hold(chance.uniform(0, 0.004))) for _ in range(6)]
            for task in tasks:
                # A step of the loop, or so long that some are in each stage.
                await asyncio.sleep(chance.choice([0, 0, chance.uniform(0, 0.02)]))
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await become(lambda: nothing_is_left(lock), "nothing is held, and nobody waits")

    run(main())


def test_a_waiter_that_is_cancelled_in_the_moment_of_its_grant_holds_nothing(lock: Lock, run: Run) -> None:
    async def main() -> None:
        for _ in range(20):
            lease = await lock.aacquire()
            waits = asyncio.create_task(lock.aacquire())
            await become(lambda: waiters(lock) == 1, "it is queued")
            lease.release()
            while not lock.state().holders:
                await asyncio.sleep(0)
            # As a rule the answer is still on its way to the loop.
            waits.cancel()
            with suppress(asyncio.CancelledError):
                given = await waits
                await given.arelease()
            await become(lambda: nothing_is_left(lock), "it is given back")

    run(main())


def test_a_waiter_that_is_cancelled_leaves_nothing_in_the_loop(lock: Lock, run: Run) -> None:
    known = ContextVar[object]("known")

    async def wait(request: object) -> None:
        known.set(request)
        await lock.aacquire()

    async def main() -> None:
        request = threading.Event()
        is_gone = ref(request)
        async with lock:
            waits = asyncio.create_task(wait(request))
            await become(lambda: waiters(lock) == 1, "it is queued")
            await asyncio.sleep(0.1)  # Until the loop has the answer.
            waits.cancel()
            with suppress(asyncio.CancelledError):
                await waits
            del waits, request
            await become(lambda: not waiters(lock), "its turn is given back")
            gc.collect()
            assert is_gone() is None

    run(main())


def test_a_release_that_is_cancelled_is_made(lock: Lock, run: Run) -> None:
    async def main() -> None:
        for _ in range(20):
            lease = await lock.aacquire()
            releases = asyncio.create_task(lease.arelease())
            await asyncio.sleep(0)
            releases.cancel()
            with suppress(asyncio.CancelledError):
                await releases
            assert not lease.held
            await become(lambda: nothing_is_left(lock), "it is given back")

    run(main())


def test_a_loop_that_ends_under_its_waiters_leaves_nothing_and_harms_no_other_loop(lock: Lock, run: Run) -> None:
    loop = asyncio.new_event_loop()
    lease = loop.run_until_complete(lock.aacquire())

    async def begin_to_wait() -> "asyncio.Task[Lease | None]":
        waits = asyncio.create_task(lock.aacquire())
        await become(lambda: waiters(lock) == 1, "it is queued")
        return waits

    waits = loop.run_until_complete(begin_to_wait())
    loop.close()

    async def main() -> None:
        other = asyncio.create_task(lock.aacquire(timeout=SOON))
        # Long enough, as a rule, for it to be queued behind the other one.
        await asyncio.sleep(0.1)
        lease.release()
        given = await other
        # Less than a lease lasts.
        assert given.waited < 15
        await given.arelease()

    run(main())
    # Its loop is closed, so it cannot be awaited.
    waits._log_destroy_pending = False  # type: ignore[attr-defined]


def test_coroutines_that_are_thrown_away_give_back_what_they_hold_and_their_turns(lock: Lock) -> None:
    async def hold() -> None:
        async with lock:
            await asyncio.Event().wait()

    async def begin() -> None:
        tasks = [asyncio.create_task(hold()) for _ in range(3)]
        await become(lambda: waiters(lock) == 2, "one holds it, and two are queued")
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    del loop
    gc.collect()

    until(lambda: nothing_is_left(lock), "nothing is held, and nobody waits", SOON)


@pytest.mark.parametrize("has_waited", [False, True])
def test_the_lease_of_a_task_that_has_ended_without_a_release_ends_within_its_ttl(
    lock: Lock, url: str, run: Run, has_waited: bool
) -> None:
    """Without waiting for the garbage collector, which may not come for a long time."""
    short = Lock("stock", url=url, ttl=1)

    async def forget() -> None:
        assert await short.aacquire(timeout=SOON) is not None

    async def main() -> None:
        first = await lock.aacquire() if has_waited else None
        forgets = asyncio.create_task(forget())
        if first is not None:
            await become(lambda: waiters(lock) == 1, "it waits")
            await first.arelease()
        await forgets
        del forgets  # A task keeps its context, and so its leases.
        lease = await lock.aacquire(timeout=SOON)
        await lease.arelease()

    with lock:
        pass  # The first request loads the scripts, and may leave a cycle of the client's.
    gc.collect()
    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()


def test_a_scope_of_anyio_that_is_cancelled_leaves_nothing(lock: Lock, url: str) -> None:
    """Such a scope cancels each `await` in it, those of the release too."""
    other = Lock("stock", url=url)

    async def main() -> None:
        async with other:
            with anyio.move_on_after(0.2):
                async with lock:
                    raise AssertionError("it is held")
            await become(lambda: waiters(lock) == 0, "its turn is given back")
        for _ in range(5):
            with anyio.CancelScope() as scope:
                async with lock:
                    scope.cancel()
                    await anyio.sleep(SOON)
            await become(lambda: nothing_is_left(lock), "it is given back")

    anyio.run(main)


def test_a_forked_child_waits_for_its_parent(valkey: Server) -> None:
    lock = Lock("stock", url=valkey.url)

    async def ask(timeout: float) -> bool:
        lease = await lock.aacquire(timeout=timeout)
        if lease is not None:
            await lease.arelease()
        return lease is not None

    async def main() -> tuple[str, str]:
        async with lock:
            assert not await ask(0.2)
            loop = asyncio.get_running_loop()
            # In a thread of its own, where no loop runs; so none runs in the child.
            refused = await loop.run_in_executor(None, in_a_fork, lambda: asyncio.run(ask(0.2)))
        granted = await loop.run_in_executor(None, in_a_fork, lambda: asyncio.run(ask(SOON)))
        return refused, granted

    assert asyncio.run(main()) == ("False", "True")
    assert nothing_is_left(lock)


def test_where_no_event_loop_of_asyncio_runs_nothing_is_held(lock: Lock) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        lock.aacquire().send(None)


def test_where_nobody_may_listen_all_look_from_time_to_time(run: Run) -> None:
    with running("valkey") as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "deaf", "on", ">secret", "~*", "+@all", "resetchannels")
        holds = Lock("stock", url=server.url)
        lock = Lock("stock", url=f"redis://deaf:secret@127.0.0.1:{server.port}/0")

        async def use_it() -> float:
            async with lock as lease:
                return lease.waited

        async def main() -> list[float]:
            async with holds:
                assert await lock.aacquire(timeout=0.3) is None
                # More than look by themselves because they are near the front.
                waits = [asyncio.create_task(use_it()) for _ in range(8)]
                await become(lambda: waiters(holds) == 8, "they are queued")
            return await asyncio.gather(*waits)

        # Not only as the holder's lease would have ended, nor once in a ttl.
        assert max(run(main())) < 25
        assert nothing_is_left(holds)


def test_a_silent_store_is_an_error_and_the_loop_goes_on(valkey: Server, run: Run) -> None:
    async def main(lock: Lock) -> int:
        ticks = 0
        asks = asyncio.create_task(lock.aacquire(timeout=1))
        while not asks.done():
            ticks += 1
            await asyncio.sleep(0.01)
        with pytest.raises(StoreError):
            await asks
        return ticks

    with Proxy(valkey.port) as proxy:
        lock = Lock("stock", url=f"redis://127.0.0.1:{proxy.port}/0")
        with lock:
            pass
        proxy.black_hole()
        assert run(main(lock)) > 50


@pytest.mark.prove
def test_at_a_silent_store_no_crowd_makes_anybody_wait_for_much_longer(valkey: Server, run: Run) -> None:
    async def main(locks: list[Lock]) -> float:
        began = time.monotonic()
        answers = await asyncio.gather(*(lock.aacquire(timeout=1) for lock in locks), return_exceptions=True)
        assert all(isinstance(answer, StoreError) for answer in answers)
        return time.monotonic() - began

    with Proxy(valkey.port) as proxy:
        locks = [Lock(f"stock {number}", url=f"redis://127.0.0.1:{proxy.port}/0") for number in range(100)]
        with locks[0]:
            pass
        proxy.black_hole()
        # Eight threads would need a minute for so many questions of five seconds.
        assert run(main(locks)) < 40
