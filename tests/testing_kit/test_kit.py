"""The kit's own borders: wrong use is told, and nothing of it is left."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import ref

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import ConfigurationError, Lock, SingletonLockError, SingletonTask, StoreError, signals
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.testing import HELD_BY_TEST, disabled, expire, hold, memory_store, recorded
from tests.forks import in_a_fork
from tests.servers import SERVERS, Server
from tests.waiting import until


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("kit", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_always_eager = True
    yield app
    app.close()


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(base=SingletonTask, name="kit.task", lock_key=("number",), lock_ttl=3)
    def task(number: int = 1) -> str:
        return "ran"

    return task


@pytest.fixture
def plain(app: Celery) -> Any:
    @app.task(name="kit.plain")
    def plain() -> None: ...

    return plain


# Wrong use.


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("verb", [hold, expire])
def test_wrong_use_is_told_with_its_name_and_what_to_do(app: Celery, task: Any, plain: Any, verb: Any) -> None:
    name = verb.__name__
    with memory_store(app):
        lock = Lock("stock", app=app)
        assert f"{name}(kit.plain): it has no lock; give a task with base=SingletonTask" in refusal(lambda: verb(plain))
        assert f"{name}(print)" in refusal(lambda: verb(print)).replace("<built-in function print>", "print")
        assert f"{name}({lock.key!r})" in refusal(lambda: verb(lock))
        assert f"{name}('stock'): that is not a lock key" in refusal(lambda: verb("stock"))
        assert "takes no call arguments" in refusal(lambda: verb(lock.key, 7))
        assert "takes no call arguments" in refusal(lambda: verb(lock.key, app="kit"))
        wrong = refusal(lambda: verb(task, 1, 2))
        assert f"{name}(kit.task): " in wrong
        assert "give the arguments of the call" in wrong
        with disabled():
            assert f"{name}(kit.task) has no effect inside disabled()" in refusal(lambda: verb(task))


def test_a_store_needs_an_app_and_a_clock_that_goes_on(app: Celery) -> None:
    assert "memory_store('kit')" in refusal(lambda: memory_store("kit").__enter__())  # type: ignore[arg-type]
    with memory_store(app) as store:
        for seconds in (-1, float("inf"), float("nan"), True, "3600"):
            assert f"advance({seconds!r})" in refusal(lambda seconds=seconds: store.advance(seconds))


def test_nobody_can_expire_who_is_not_there(app: Celery, task: Any) -> None:
    with memory_store(app), pytest.raises(SingletonLockError, match=r"expire\(kit.task\): key=.* has no holder"):
        expire(task)


def test_a_lock_that_is_held_is_not_held_once_more(app: Celery, task: Any) -> None:
    with memory_store(app), hold(task):
        with pytest.raises(SingletonLockError, match=f"task_id={HELD_BY_TEST}; let that run end first"), hold(task):
            pass

        assert [holder.task_id for holder in task.lock_holders()] == [HELD_BY_TEST]


def test_a_copy_in_another_process_locks_nothing_without_a_word(app: Celery, task: Any) -> None:
    def says() -> str:
        try:
            task.apply(throw=True)
        except ConfigurationError as error:
            return str(error)
        return "ran"

    with memory_store(app):
        told = in_a_fork(says)

        assert f"memory_store() was entered in process {os.getpid()}" in told
        assert "'solo' or 'threads'" in told


# What lasts as long as its block.


def living(signal: Any) -> int:
    """How many receive it; Celery drops those that have gone when the next one comes."""
    gc.collect()
    receivers = [receiver for _, receiver in signal.receivers or ()]
    return sum(1 for each in receivers if not isinstance(each, ref) or each() is not None)


def state_of(app: Celery) -> tuple[Any, ...]:
    told = (signals.lock_acquired, signals.lock_conflict, signals.lock_lost, signals.lock_released)
    return (
        dict(app.conf.changes),
        [living(each) for each in (*told, signals.lock_unanswered)],
    )


@pytest.mark.prove
@pytest.mark.parametrize("url", [None, "redis://localhost:1/0", "memory://own"])
def test_nothing_is_left_whatever_happens(app: Celery, task: Any, url: str | None) -> None:
    if url is not None:
        app.conf.singleton_lock_url = url
        Lock("stock", app=app)
    task.lock_key_for()
    before = state_of(app)
    for number in range(3):
        with (
            pytest.raises(ZeroDivisionError),
            memory_store(app),
            recorded(),
            hold(task, number),
            disabled(),
            disabled(),
        ):
            _ = 1 / 0

        assert state_of(app) == before
    # Locks are on again, and what was held is free.
    app.conf.singleton_lock_url = "memory://after"
    with hold(task), pytest.raises(TaskRevokedError):
        task.delay().get()
    assert task.lock_holders() == []


def test_a_store_in_memory_takes_the_place_of_one_in_a_namespace() -> None:
    class Settings:
        SHOP_SINGLETON_LOCK_URL = "redis://redis.invalid:6379/0"

    django = Celery("django", broker="memory://", set_as_current=False)
    django.config_from_object(Settings, namespace="SHOP")
    with memory_store(django) as store:
        assert store_of(django) is store
    assert store_of(django).address == "redis://redis.invalid:6379/0"


@pytest.mark.prove
def test_a_lock_goes_with_its_app_whenever_it_was_made(app: Celery) -> None:
    app.conf.singleton_lock_url = "redis://redis.invalid:6379/0"
    other = Lock("stock", url="memory://other", app=app)
    before = Lock("stock", app=app)
    inside = None
    for _ in range(2):
        with memory_store(app) as store:
            inside = inside or Lock("stock", app=app)
            with before:
                assert inside.acquire(blocking=False) is None
                with memory_store(app) as inner, inside:
                    assert len(inner.held()) == len(store.held()) == 1
                with other:
                    assert len(store.held()) == 1
        for lock in (inside, before):
            with pytest.raises(StoreError, match=r"redis\.invalid"):
                lock.acquire(blocking=False)


# Holding and ending, in each store.


@pytest.fixture(params=["memory", *SERVERS])
def somewhere(request: pytest.FixtureRequest, app: Celery) -> AbstractContextManager[Any]:
    if request.param == "memory":
        return memory_store(app)
    server: Server = request.getfixturevalue(f"{request.param}_process")
    with server.client() as client:
        client.flushall()
    app.conf.singleton_lock_url = server.url.removesuffix("/0") + "/2"
    return ExitStack()


def test_a_hold_lasts_longer_than_its_ttl(app: Celery, task: Any, somewhere: Any) -> None:
    over = threading.Event()
    with somewhere, hold(task):
        assert not over.wait(4)
        with pytest.raises(TaskRevokedError):
            task.delay().get()


def is_waited_for(app: Celery, key: str) -> bool:
    return bool(store_of(app).survey([key])[0].waiters)


def test_who_waits_gets_what_expires(app: Celery, somewhere: Any) -> None:
    got: list[Any] = []

    def wait(lock: Lock) -> None:
        lease = lock.acquire(timeout=60)
        got.append(lease and lease.took_over)
        if lease:
            lease.release()

    with somewhere:
        lock = Lock("stock", app=app)
        waiter = threading.Thread(target=wait, args=(lock,), daemon=True)
        with hold(lock.key, app=app):
            waiter.start()
            until(lambda: is_waited_for(app, lock.key), "it waits")
            expire(lock.key, app=app)
            # By itself it would look again once the lease had ended that it was told of, in half a minute.
            until(lambda: got, "it has the lock")
        waiter.join(20)

    assert got == [True]


def test_with_a_limit_one_place_is_held(app: Celery, somewhere: Any) -> None:
    @app.task(base=SingletonTask, name="kit.pair", lock_key=(), lock_limit=2)
    def pair() -> str:
        return "ran"

    with somewhere, hold(pair):
        assert pair.delay().get() == "ran"
        with hold(pair):
            with pytest.raises(TaskRevokedError):
                pair.delay().get()
            expire(pair)
            assert pair.lock_holders() == []
        assert pair.delay().get() == "ran"


def test_a_lease_of_this_process_is_lost_at_once(app: Celery, somewhere: Any) -> None:
    with somewhere, recorded() as record:
        lock = Lock("stock", app=app, ttl=30)
        with lock as lease:
            expire(lock.key, app=app)

            assert lease.lost_reason == "expired"
            assert [lost.key for lost in record.lost] == [lock.key]
            with Lock("stock", app=app) as successor:
                assert successor.took_over
        assert [released.key for released in record.released] == [lock.key]


def test_what_has_expired_stays_so_although_its_body_goes_on(app: Celery, somewhere: Any) -> None:
    with somewhere, recorded() as record:
        lock = Lock("stock", app=app, ttl=1)
        with lock:
            expire(lock.key, app=app)
            # Its heartbeat would have renewed it by then.
            assert not threading.Event().wait(0.8)
            assert store_of(app).holders(lock.key) == []
        assert record.released == []


def test_whoever_listens_is_told_before_it_goes_on(app: Celery) -> None:
    told: list[str] = []

    def tell(reason: str, **_: object) -> None:
        threading.Event().wait(0.2)
        told.append(reason)

    signals.lock_lost.connect(tell)
    with memory_store(app), Lock("stock", app=app) as lease:
        expire(lease.key, app=app)

        assert told == ["expired"]


def test_a_lock_by_another_door_is_lost_at_once_as_well(app: Celery, valkey: Server) -> None:
    app.conf.singleton_lock_url = valkey.url
    with Lock("stock", app=app, url=valkey.url) as lease:
        expire(lease.key, app=app)

        assert lease.lost


def test_locks_are_off_in_a_process_that_is_forked_inside(app: Celery, task: Any) -> None:
    with disabled():
        assert in_a_fork(lambda: task.delay().get()) == "'ran'"


def test_locks_are_off_until_the_last_block_ends(app: Celery, task: Any) -> None:
    with memory_store(app) as store:
        with disabled():
            with disabled():
                pass
            assert task.delay().get() == "ran"
            leases = [Lock("stock", app=app).acquire(timeout=5) for _ in range(2)]
            assert [lease is not None and lease.held for lease in leases] == [True, True]
            assert store.held() == []
        with Lock("stock", app=app):
            assert len(store.held()) == 1


def test_what_the_test_holds_is_free_although_it_was_taken_over(app: Celery, task: Any, somewhere: Any) -> None:
    with somewhere:
        with hold(task):
            expire(task)
            with hold(task):
                pass
            expired = task.lock_holders()
        assert expired == task.lock_holders() == []
        assert task.delay().get() == "ran"


def test_a_hold_without_a_server_hints_at_the_store_in_memory() -> None:
    app = Celery("away", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "redis://127.0.0.1:1/0"

    @app.task(base=SingletonTask, name="away.task")
    def task() -> None: ...

    with pytest.raises(StoreError, match=r"memory_store\(app\)"), hold(task):
        pass
