"""The kit's own borders: wrong use is told, and nothing of it is left."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import ref

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import ConfigurationError, Lock, SingletonLockError, SingletonTask, StoreError, signals
from celery_singleton_lock.leases import heartbeat
from celery_singleton_lock.leases.counters import counters
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


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("verb", [hold, expire])
def test_wrong_use_is_told_with_its_name_and_what_to_do(app: Celery, task: Any, plain: Any, verb: Any) -> None:
    name = verb.__name__
    with memory_store(app):
        lock = Lock("stock", app=app)
        for wrong in (plain, print, lock):
            assert "give a task with base=SingletonTask, or a lock key" in refusal(lambda wrong=wrong: verb(wrong))
        assert f"{name}(kit.plain): " in refusal(lambda: verb(plain))
        assert f"{name}('stock'): give a task" in refusal(lambda: verb("stock"))
        assert "takes no call arguments" in refusal(lambda: verb(lock.key, 7))
        assert "takes no call arguments" in refusal(lambda: verb(lock.key, app="kit"))
        too_many = refusal(lambda: verb(task, 1, 2))
        assert f"{name}(kit.task): " in too_many
        assert "give the arguments of the call" in too_many
        with disabled():
            assert f"{name}(kit.task) has no effect inside disabled()" in refusal(lambda: verb(task))


def test_a_store_needs_an_app_and_a_clock_that_goes_on(app: Celery) -> None:
    assert "memory_store('kit')" in refusal(lambda: memory_store("kit").__enter__())  # type: ignore[arg-type]
    with memory_store(app) as store:
        for seconds in (-1, float("inf"), float("nan"), True, "3600"):
            assert f"advance={seconds!r}" in refusal(lambda seconds=seconds: store.advance(seconds))


def living(signal: Any) -> int:
    """How many receive it; Celery drops those that have gone when the next one comes."""
    gc.collect()
    receivers = [receiver for _, receiver in signal.receivers or ()]
    return sum(1 for each in receivers if not isinstance(each, ref) or each() is not None)


def state_of(app: Celery) -> tuple[Any, ...]:
    told = (signals.lock_acquired, signals.lock_conflict, signals.lock_lost, signals.lock_released)
    return (dict(app.conf.changes), [living(each) for each in (*told, signals.lock_unanswered)])


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
    app.conf.singleton_lock_url = "memory://after"
    with hold(task), pytest.raises(TaskRevokedError):
        task.delay().get()
    assert task.lock_holders() == []


@pytest.fixture(params=["memory", *SERVERS])
def somewhere(request: pytest.FixtureRequest, app: Celery) -> AbstractContextManager[Any]:
    if request.param == "memory":
        return memory_store(app)
    server: Server = request.getfixturevalue(f"{request.param}_process")
    server.flush()
    app.conf.singleton_lock_url = server.url.removesuffix("/0") + "/2"
    return ExitStack()


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
            until(lambda: lock.state().waiting, "it waits")
            expire(lock.key, app=app)
            # Unless it is woken, it looks again only when the lease that it knows of ends, in half a minute.
            until(lambda: got, "it has the lock")
        waiter.join(20)

    assert got == [True]


def test_a_store_lives_no_longer_than_its_block(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LINGERS", 0.05)
    with memory_store(app) as store, Lock("stock", app=app):
        pass
    known = ref(store)
    del store
    counters.flush()

    until(lambda: gc.collect() is not None and known() is None, "it is forgotten")


def test_every_lock_is_in_memory_whatever_its_url(app: Celery) -> None:
    nowhere = "redis://localhost:1/0"
    made_before, of_another = Lock("stock", url=nowhere), Celery("other", set_as_current=False)
    of_another.conf.singleton_lock_url = nowhere
    with memory_store(app) as store:
        for lock in (made_before, Lock("here", url=nowhere), Lock("there", app=of_another)):
            with lock as lease:
                assert [holder.key for holder in store.held()] == [lock.key]
                expire(lock.key, app=app)
                assert lease.lost
        with memory_store(of_another) as other, Lock("own", app=of_another), Lock("stock", app=app):
            assert [len(each.held()) for each in (store, other)] == [1, 1]
        with disabled(), memory_store(of_another) as inside, made_before, made_before:
            assert inside.held() == store.held() == []

    with pytest.raises(StoreError, match="localhost:1"):
        made_before.state()


def test_whoever_listens_is_told_before_it_goes_on(app: Celery) -> None:
    told: list[str] = []

    def tell(reason: str, **_: object) -> None:
        threading.Event().wait(0.2)
        told.append(reason)

    signals.lock_lost.connect(tell)
    with memory_store(app), Lock("stock", app=app) as lease:
        expire(lease.key, app=app)

        assert told == ["expired"]


def test_locks_are_off_in_a_process_that_is_forked_inside(app: Celery, task: Any) -> None:
    with disabled():
        assert in_a_fork(lambda: task.delay().get()) == "'ran'"


def test_where_locks_are_off_the_lock_of_a_call_keeps_nobody_out(app: Celery, task: Any) -> None:
    with disabled(), task.lock_for() as first, task.lock_for() as second:
        assert first.held
        assert second.held
        assert task.delay().get() == "ran"


def test_nobody_can_expire_who_is_not_there(app: Celery, task: Any) -> None:
    with memory_store(app), pytest.raises(SingletonLockError, match=r"expire\(kit.task\): key=.* has no holder"):
        expire(task)


def test_a_lock_that_is_held_is_not_held_once_more(app: Celery, task: Any) -> None:
    with memory_store(app), hold(task):
        with pytest.raises(SingletonLockError, match=f"task_id={HELD_BY_TEST}; let that run end first"), hold(task):
            pass

        assert [holder.task_id for holder in task.lock_holders()] == [HELD_BY_TEST]


def test_in_a_queue_mode_a_call_is_queued_and_not_once_more(app: Celery) -> None:
    @app.task(base=SingletonTask, name="kit.queued", lock_mode="until_executing")
    def queued() -> None: ...

    with memory_store(app):
        with hold(queued) as holder:
            assert (holder.state, holder.task_id, holder.fence) == ("queued", HELD_BY_TEST, 0)
            assert (queued.lock_state().queued, queued.lock_holders()) == (HELD_BY_TEST, [])
            with pytest.raises(SingletonLockError, match=f"already held by task_id={HELD_BY_TEST}"), hold(queued):
                pass
            assert queued.lock_state().queued == HELD_BY_TEST
        assert queued.lock_state().queued is None
