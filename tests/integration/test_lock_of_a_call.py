"""The lock of a task's call, for other code: to keep out of its way, to see who has it, and to drop its marks."""

import asyncio
import inspect
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, Lock, LockHeld, LockState, SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.operations import break_marks
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.testing import HELD_BY_TEST, expire, hold
from tests.contract.asking import Waiter
from tests.waiting import until


def task_of(app: Celery, **options: Any) -> Any:
    defaults: Any = {"name": "load", "lock_key": ("supplier",), "lock_skip_result": "skipped"}

    @app.task(base=SingletonTask, **{**defaults, **options})
    def load(supplier: int, full: bool) -> str:
        return "loaded"

    return load


def test_the_lock_of_a_call_and_its_run_exclude_one_another(app: Celery) -> None:
    task = task_of(app, lock_ttl=7, lock_limit=2)

    with task.lock_for(7) as lease:
        assert (lease.key, lease.ttl) == (task.lock_key_for(7, False), 7)
        assert task.lock_for(supplier=7, full=True).acquire(timeout=0) is None
        assert task.apply((7, True)).get() == "skipped"
        assert task.apply((8, True)).get() == "loaded"
    with hold(task, 7):
        assert task.lock_for(7).acquire(blocking=False) is None
        assert task.apply((7, True)).get() == "loaded"
    assert task.apply((7, True)).get() == "loaded"


@pytest.mark.timeout(120)
def test_the_lock_of_a_call_waits_for_all_runs_and_gives_its_turn_back_if_it_gives_up(app: Celery) -> None:
    task = task_of(app, lock_limit=3)
    lock = task.lock_for(7)

    async def is_cancelled() -> None:
        async with asyncio.timeout(1):
            await lock.aacquire()

    with hold(task, 7), hold(task, 7) as longest:
        assert lock.acquire(timeout=0.2) is None
        with pytest.raises(TimeoutError):
            asyncio.run(is_cancelled())
        until(lambda: task.lock_state(7).waiting == 0, "nothing waits any more")
        assert task.apply((7, True)).get() == "loaded"
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(lock.acquire, timeout=60)
            until(lambda: task.lock_state(7).waiting == 1, "it waits")
            assert task.apply((7, True)).get() == "skipped"
            expire(task, 7)
            lease = waiting.result(60)
    assert lease.fence > longest.fence
    assert [holder.fence for holder in task.lock_holders(7)] == [lease.fence]
    lease.release()
    assert task.lock_holders(7) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("timeout", [0, timedelta(seconds=0.2)])
def test_a_wait_for_the_run_of_a_call_has_a_bound(app: Celery, timeout: Any) -> None:
    task = task_of(app)
    lock = task.lock_for(7)
    lock.timeout = timeout

    @lock
    def count() -> None:
        raise AssertionError

    async def in_a_loop() -> None:
        async with lock:
            raise AssertionError

    with hold(task, 7):
        assert task.lock_for(7).acquire(timeout=timeout) is None
        for wait in (lock.__enter__, count, partial(asyncio.run, in_a_loop())):
            with pytest.raises(LockHeld) as held:
                wait()
            assert (held.value.key, held.value.holder_task_id) == (lock.key, HELD_BY_TEST)
    with lock as lease:
        assert lease.held
    lock.timeout = -1
    with pytest.raises(ConfigurationError, match="timeout=-1"):
        lock.__enter__()


def test_a_call_with_an_id_that_is_no_text_is_revoked_and_leaves_no_mark(app: Celery) -> None:
    task = task_of(app, lock_mode="until_executed")

    task.apply_async((7, True), task_id=uuid.uuid4(), countdown=60).revoke()  # type: ignore[arg-type]

    assert task.lock_state(7).queued is None


@pytest.mark.parametrize("ask", ["lock_for", "lock_state", "lock_holders"])
def test_arguments_that_make_no_key_are_an_error_that_names_the_task(app: Celery, ask: str) -> None:
    by_name = getattr(task_of(app), ask)
    by_format = getattr(task_of(app, name="other", lock_key="{supplier:d}"), ask)
    for arguments, told in (({}, "'supplier'"), ({"supplier": 1, "size": 2}, "'size'")):
        with pytest.raises(TypeError, match=f"task load: .*{told}"):
            by_name(**arguments)
    with pytest.raises(ConfigurationError, match="task other: lock_key"):
        by_format("seven")


def test_a_mode_without_a_lock_of_the_run_says_so(app: Celery) -> None:
    with pytest.raises(ConfigurationError, match=r"task load: lock_for\(...\) would keep no run out"):
        task_of(app, lock_mode="until_executing").lock_for(7)


def test_the_state_of_a_call_says_who_has_its_lock_and_who_comes(app: Celery) -> None:
    task = task_of(app, lock_mode="until_and_while_executing")
    assert (task.lock_state(7).holders, task.lock_state(7).queued, task.lock_state(7).next) == ([], None, None)

    sent = task.delay(7, full=True)
    with hold(task, 7):
        claim = Claim(task.lock_key_for(7, True), "of-the-next", 30, task_id="the-next", succeeds="rerun")
        store_of(app).acquire(claim)
        with Waiter(store_of(app), Claim(claim.key, "of-a-waiter", 30)) as waiter:
            waiter.ask()
            state = task.lock_state(7)
    assert isinstance(state, LockState)
    assert [holder.task_id for holder in state.holders] == [HELD_BY_TEST]
    assert (state.queued, state.next, state.waiting, state.cooldown_until) == (sent.id, "the-next", 1, None)
    assert state.holders[0].token not in repr(state)
    assert task.lock_for(7).state().queued == sent.id


@pytest.mark.parametrize("mode", ["while_executing", "until_executed"])
def test_a_cool_down_is_no_holder_and_says_until_when(app: Celery, mode: str) -> None:
    task = task_of(app, lock_mode=mode, lock_min_hold=60)
    app.conf.task_always_eager = mode == "while_executing"

    task.delay(7, full=True)
    state = task.lock_state(7)
    assert state.holders == []
    assert timedelta(seconds=30) < state.cooldown_until - datetime.now(UTC) < timedelta(seconds=90)


def test_a_block_that_meets_a_cool_down_says_so(app: Celery) -> None:
    task = task_of(app, lock_min_hold=60)
    ran = task.apply((7, True))
    lock = task.lock_for(7)
    lock.timeout = 0

    with pytest.raises(LockHeld, match="cool-down") as refused, lock:
        pass
    assert (refused.value.state, refused.value.holder_task_id) == ("cooldown", ran.id)
    assert 30 < refused.value.expires_in < 90


def test_break_marks_drops_those_of_locks_that_nobody_holds(app: Celery) -> None:
    task = task_of(app, lock_mode="until_executed")
    for supplier in (7, 8):
        task.delay(supplier, full=True)

    with hold(task, 8):
        assert [break_marks(app, pattern) for pattern in ("other*", "lo*", "lo*")] == [0, 1, 0]
        assert [task.lock_state(supplier).queued is None for supplier in (7, 8)] == [True, False]


def test_each_call_of_a_decorated_function_takes_the_lock(app: Celery) -> None:
    lock = Lock("stock", app=app, limit=2, timeout=0)

    class Shop:
        @lock
        def count(self, places: int, *, deeper: bool = True) -> int:
            """How many hold it."""
            return self.count(places, deeper=False) if deeper else len(lock.state().holders) + places

    assert Shop().count(40) == 42
    assert (Shop.count.__name__, Shop.count.__doc__) == ("count", "How many hold it.")
    with lock, pytest.raises(LockHeld):
        Shop().count(40)
    assert lock.state().holders == []


async def several() -> Any:
    yield


def generator() -> Iterator[None]:
    yield


def plain() -> None: ...


PLAIN = Celery("plain", set_as_current=False).task(shared=False)(plain)


class Lazy:
    def __call__(self, _: Lock) -> Iterator[None]:
        yield


@pytest.mark.parametrize("thing", [several, generator, partial(generator), Celery, "stock", PLAIN])
def test_what_is_not_done_when_it_returns_is_not_decorated(app: Celery, thing: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot decorate .*take the lock inside"):
        Lock("stock", app=app)(thing)


class Later:
    async def __call__(self, lock: Lock) -> int:
        return len(lock.state().holders)


def wrapped(lock: Lock) -> Any:
    """As a decorator that is no coroutine function itself leaves it."""
    return Later()(lock)


async def twice(lock: Lock) -> Any:
    return wrapped(lock)


async def function(lock: Lock) -> int:
    return len(lock.state().holders)


@pytest.mark.parametrize("later", [function, partial(partial(Later().__call__))])
def test_each_call_of_a_decorated_object_takes_the_lock_until_its_coroutine_has_ended(app: Celery, later: Any) -> None:
    lock = Lock("stock", app=app, timeout=0)

    assert asyncio.run(lock(later)(lock)) == 1
    assert lock.state().holders == []
    with lock, pytest.raises(LockHeld):
        asyncio.run(lock(later)(lock))


@pytest.mark.parametrize(
    "later", [wrapped, partial(wrapped), twice, Later(), Lazy(), lambda _: generator(), lambda _: several()]
)
def test_a_decorated_call_that_leaves_its_work_to_others_fails(app: Celery, later: Any) -> None:
    lock = Lock("stock", app=app)

    async def call() -> Any:
        result = lock(later)(lock)
        return await result if inspect.iscoroutine(result) else result

    with pytest.raises(ConfigurationError, match=r"returned a \w+, whose work would be done after"):
        asyncio.run(call())
    assert lock.state().holders == []
