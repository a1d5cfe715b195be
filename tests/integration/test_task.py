"""`SingletonTask` inside one process: who takes a lock, what the body sees, and that nothing stays held."""

import contextvars
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, Task, shared_task, states, uuid
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError

from celery_singleton_lock import (
    ConfigurationError,
    Lease,
    LockHeld,
    LockLost,
    SingletonTask,
    StoreError,
    current_lease,
    signals,
)
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts, Grant
from tests.servers import Server, free_port
from tests.tracing import tracer_of
from tests.waiting import until


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    app = Celery("integration", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_url=server.url, singleton_lock_ttl=5)
    yield app
    app.close()


def held_by_somebody(app: Celery, key: str) -> Callable[[], Any]:
    """Have another run hold the key; return what ends it."""
    store, claim = store_of(app), Claim(key, "token of the holder", 30, facts=Facts(task_id="the-holder"))
    assert isinstance(store.acquire(claim), Grant)
    return lambda: store.release(claim, None)


def keys(server: Server) -> list[str]:
    with server.client() as client:
        return list(client.scan_iter("*"))


def test_the_body_runs_under_a_lease_that_knows_itself(app: Celery, server: Server) -> None:
    seen: dict[str, Any] = {}

    @app.task(base=SingletonTask, bind=True)
    def body(self: Any, x: int) -> None:
        seen.update(lease=self.lock, current=current_lease(), holders=self.lock_holders(x), keys=keys(server))
        self.lock.check()
        seen["remaining"] = self.lock.remaining()

    result = body.apply((1,))
    result.get()

    lease, (holder,) = seen["lease"], seen["holders"]
    assert lease is seen["current"]
    assert seen["keys"] == [lease.key] == [body.lock_key_for(1)]
    assert 0 < seen["remaining"] <= 5
    assert (holder.key, holder.token, holder.fence) == (lease.key, lease.token, lease.fence)
    assert (holder.task_id, holder.task_name) == (result.id, body.name)
    assert (holder.pid, holder.hostname) == (os.getpid(), socket.gethostname())
    assert holder.acquired_at == lease.acquired_at
    assert abs(datetime.now(UTC) - lease.acquired_at) < timedelta(minutes=1)
    assert not lease.took_over
    assert not lease.lost
    assert (body.lock.held, current_lease(), keys(server)) == (False, None, [])


def test_what_a_body_does_with_its_lease_can_be_done_without_one(app: Celery) -> None:
    @app.task(base=SingletonTask, bind=True)
    def body(self: Any) -> bool:
        self.lock.check()
        self.lock.release()
        return bool(self.lock.held)

    assert body.apply().get() is False
    assert body() is False


def end_by_returning(_: Any) -> None: ...


def end_by_raising(_: Any) -> None:
    raise ValueError


def end_by_ignore(_: Any) -> None:
    raise Ignore


def end_by_reject(_: Any) -> None:
    raise Reject("no", requeue=False)


def end_by_retry(task: Any) -> None:
    raise Retry("again")


def end_by_exit(_: Any) -> None:
    raise SystemExit(1)


def end_by_memory_error(_: Any) -> None:
    raise MemoryError


ENDINGS = [
    end_by_returning,
    end_by_raising,
    end_by_ignore,
    end_by_reject,
    end_by_retry,
    end_by_exit,
    end_by_memory_error,
]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
@pytest.mark.parametrize("throw", [False, True])
def test_however_the_body_ends_its_lock_is_free(app: Celery, server: Server, ending: Any, throw: bool) -> None:
    held = []

    @app.task(base=SingletonTask, bind=True)
    def body(self: Any) -> None:
        held.extend(keys(server))
        ending(self)

    with suppress(ValueError, Ignore, Reject, Retry, SystemExit, MemoryError):
        body.apply(throw=throw)

    assert len(held) == 1
    assert keys(server) == []


def test_the_lock_is_free_before_the_next_step_of_a_canvas_begins(app: Celery) -> None:
    app.conf.task_always_eager = True
    ran = []

    @app.task(base=SingletonTask, lock_name="shared", lock_key=())
    def first() -> None:
        ran.append("first")

    @app.task(base=SingletonTask, lock_name="shared", lock_key=())
    def second(_: Any) -> None:
        ran.append("second")

    # Celery runs the link before it calls after_return for the first one.
    first.apply_async(link=second.s())

    assert ran == ["first", "second"]


def test_a_direct_call_takes_no_lock(app: Celery, server: Server) -> None:
    @app.task(base=SingletonTask)
    def body() -> list[str]:
        return keys(server)

    assert body() == []


@pytest.mark.parametrize("mode", ["while_executing", "until_executing", "until_executed", "until_and_while_executing"])
def test_one_body_serves_each_mode_an_eager_run_and_a_direct_call(app: Celery, mode: str) -> None:
    @app.task(base=SingletonTask, bind=True, lock_mode=mode)
    def body(self: Any) -> tuple[bool, bool, bool]:
        self.lock.check()
        return self.lock.held, self.lock.fence > 0, self.lock.remaining() > 0

    assert body.apply().get() == ((False,) * 3 if mode == "until_executing" else (True,) * 3)
    assert body() == (False,) * 3


def test_a_task_that_calls_itself_directly_goes_on_under_its_lease(app: Celery, server: Server) -> None:
    @app.task(base=SingletonTask, bind=True, lock_key=())
    def countdown(self: Any, number: int) -> list[Any]:
        here = [(current_lease(), self.lock)]
        return here + countdown(number - 1) if number else here

    leases = countdown.apply((3,)).get()

    assert len(leases) == 4
    assert len({id(lease) for pair in leases for lease in pair}) == 1
    assert keys(server) == []


def test_an_eager_duplicate_is_skipped_with_the_holder_named(app: Celery) -> None:
    @app.task(base=SingletonTask)
    def body() -> str:
        return "ran"

    release = held_by_somebody(app, body.lock_key_for())
    with pytest.raises(TaskRevokedError, match="the-holder"):
        body.apply().get()
    release()

    assert body.apply().get() == "ran"


@pytest.mark.parametrize("policy", ["raise", "reschedule"])
def test_an_eager_duplicate_that_cannot_come_later_is_refused(app: Celery, policy: str) -> None:
    @app.task(base=SingletonTask, lock_on_conflict=policy)
    def body() -> str:
        return "ran"

    held_by_somebody(app, body.lock_key_for())

    with pytest.raises(LockHeld, match="the-holder"):
        body.apply().get()


def test_signals_tell_what_happens_and_a_failing_receiver_breaks_nothing(app: Celery, caplog: Any) -> None:
    told: list[tuple[str, Any]] = []

    def receiver(signal: Any = None, sender: Any = None, **facts: Any) -> None:
        told.append((signal.name, {name: getattr(value, "key", value) for name, value in facts.items()}))
        raise RuntimeError("a receiver of no use")

    @app.task(base=SingletonTask, lock_skip_result="skipped")
    def body() -> str:
        return "ran"

    key = body.lock_key_for()
    for signal in (signals.lock_acquired, signals.lock_conflict, signals.lock_lost, signals.lock_released):
        signal.connect(receiver, sender=body)

    assert body.apply().get() == "ran"
    release = held_by_somebody(app, key)
    assert body.apply().get() == "skipped"

    assert told == [
        ("lock_acquired", {"lease": key}),
        ("lock_released", {"lease": key}),
        ("lock_conflict", {"key": key, "holder": key, "outcome": "skipped"}),
    ]
    release()


def test_a_lease_found_gone_at_its_release_is_told_as_lost(app: Celery, server: Server, caplog: Any) -> None:
    lost, released = [], []

    @app.task(base=SingletonTask)
    def body() -> str:
        with server.client() as client:
            client.flushall()
        return "ran"

    def receiver(lease: Any = None, reason: Any = None, **_: Any) -> None:
        lost.append((lease.key, reason))

    def receiver_of_releases(lease: Any = None, **_: Any) -> None:
        released.append(lease)

    signals.lock_lost.connect(receiver, sender=body)
    signals.lock_released.connect(receiver_of_releases, sender=body)

    assert body.apply().get() == "ran"
    until(lambda: lost, "the receiver is told")
    assert released == []
    assert lost == [(body.lock_key_for(), "expired")]
    until(lambda: f"lock.lost key={body.lock_key_for()}" in caplog.text, "the log tells")


def test_a_lease_that_is_lost_before_the_body_begins_is_told_to_the_body(app: Celery, server: Server) -> None:
    began = []

    @app.task(base=SingletonTask, bind=True, lock_ttl=1)
    def body(self: Any) -> None:
        began.append(self.request.id)

    @app.task(base=SingletonTask, bind=True, lock_ttl=1, lock_on_lost="warn")
    def is_warned(self: Any) -> str:
        return "went on"

    def slow_receiver(lease: Lease, **_: Any) -> None:
        with server.client() as client:
            client.delete(lease.key)
        until(lambda: lease.lost, "the heartbeat has found it gone")

    for task in (body, is_warned):
        signals.lock_acquired.connect(slow_receiver, sender=task)

    assert isinstance(body.apply().result, LockLost)
    assert began == []
    assert is_warned.apply().result == "went on"


def test_a_body_that_goes_on_without_its_lock_to_its_end_is_told(
    app: Celery, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(base=SingletonTask, bind=True, lock_ttl=1)
    def swallows(self: Any) -> str:
        try:
            lose(self.lock)
            time.sleep(5)
        except Exception:  # noqa: BLE001 (as some bodies do)
            return "went on"
        return "was not told"

    @app.task(base=SingletonTask, bind=True, lock_ttl=1, lock_on_lost="warn")
    def is_warned(self: Any) -> str:
        lose(self.lock)
        return "went on"

    @app.task(base=SingletonTask, bind=True, lock_ttl=1)
    def fails(self: Any) -> None:
        lose(self.lock)
        time.sleep(5)

    def lose(lease: Lease) -> None:
        with server.client() as client:
            client.flushall()
        until(lambda: lease.lost, "it is lost")

    ended = [task.apply(throw=False).state for task in (swallows, is_warned, fails)]

    assert ended == ["SUCCESS", "SUCCESS", "FAILURE"]
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "lock.outlived" in record.msg]
    assert [(level, text.partition(" task_id")[0]) for level, text in told] == [
        ("ERROR", f"lock.outlived key={task.lock_key_for()}") for task in (swallows, is_warned)
    ]
    assert all("reason=expired: " in text for _, text in told)


@pytest.mark.parametrize("on_lost", ["abort", "warn"])
def test_a_run_that_makes_way_for_its_successor_is_no_error(
    app: Celery, server: Server, caplog: pytest.LogCaptureFixture, on_lost: str
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")

    @app.task(base=SingletonTask, bind=True, lock_ttl=3, lock_on_lost=on_lost)
    def body(self: Any) -> str:
        facts = Facts(task_id="the-successor", published=time.time_ns() // 1000 + 1_000_000)
        successor = Claim(self.lock.key, "token of the successor", 30, facts=facts, succeeds="replace", asked=True)
        store_of(app).acquire(successor)
        until(lambda: self.lock.lost, "it is told")
        time.sleep(5 if on_lost == "abort" else 0)
        return "ran"

    assert body.apply(throw=False).state == ("REVOKED" if on_lost == "abort" else "SUCCESS")

    lost = f"lock.lost key={body.lock_key_for()} task_id="
    until(lambda: lost in caplog.text, "the log tells")
    (record,) = [record for record in caplog.records if record.getMessage().startswith(lost)]
    assert (record.levelname, record.getMessage().endswith("reason=replaced")) == ("INFO", True)
    # A machine that stands still for a moment is told of as well.
    others = [record for record in caplog.records if not record.getMessage().startswith("lock.late")]
    assert [record for record in others if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("on_lost", ["abort", "warn"])
def test_a_run_that_is_broken_is_no_error_and_who_asked_is_told(
    app: Celery, server: Server, caplog: pytest.LogCaptureFixture, on_lost: str
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")

    @app.task(base=SingletonTask, bind=True, lock_ttl=3, lock_on_lost=on_lost)
    def body(self: Any) -> str:
        store_of(app).break_lock(self.lock.key, None, "alice@ops-1", force=False)
        until(lambda: self.lock.lost, "it is told")
        time.sleep(5 if on_lost == "abort" else 0)
        return "ran"

    ended = body.apply(throw=False)

    assert ended.state == ("REVOKED" if on_lost == "abort" else "SUCCESS")
    if on_lost == "abort":
        assert (str(ended.result), ended.result.reason) == (
            f"lock key={body.lock_key_for()}: broken by alice@ops-1",
            "broken",
        )
    lost = f"lock.lost key={body.lock_key_for()} task_id="
    until(lambda: lost in caplog.text, "the log tells")
    assert [record.levelname for record in caplog.records if record.getMessage().endswith("reason=broken")] == ["INFO"]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert body.lock_holders() == []


def test_a_lease_that_is_lost_while_a_retry_is_published_loses_no_retry(app: Celery, server: Server) -> None:
    class LosesItsLease(SingletonTask):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            lease = current_lease()
            assert lease is not None
            with server.client() as client:
                client.flushall()
            until(lambda: lease.lost, "the holder knows")
            # Long enough for the interrupt that follows.
            time.sleep(0.2)
            return super().apply_async(*args, **options)

    queue = uuid()

    @app.task(base=LosesItsLease, bind=True, lock_ttl=1)
    def body(self: Any) -> None:
        self.retry(countdown=60, queue=queue)

    outcome = tracer_of(body)(uuid(), (), {}, {"id": uuid(), "args": (), "kwargs": {}})

    assert outcome.info.state == states.RETRY
    with app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare(queue, passive=True).message_count == 1


def test_two_apps_in_one_process_keep_their_locks_apart(app: Celery, server: Server) -> None:
    other = Celery("other", set_as_current=False)
    other.conf.singleton_lock_url = server.url.removesuffix("/0") + "/5"
    bodies = []
    for each in (app, other):

        @each.task(base=SingletonTask, name="body", bind=True)
        def body(self: Any) -> Any:
            return [len(bodies[n].lock_holders()) for n in (0, 1)]

        bodies.append(body)

    assert [body.apply().get() for body in bodies] == [[1, 0], [0, 1]]


def test_shared_and_class_based_tasks_are_locked_as_well(app: Celery, server: Server) -> None:
    # A name of its own: apps of other tests, which live until they are collected, get the task as well.
    name = f"shared-{server.port}"

    @shared_task(base=SingletonTask, name=name)
    def shared() -> int:
        return len(keys(server))

    class ClassBased(SingletonTask):
        name = "class-based"

        def run(self, x: int, y: int = 5) -> int:
            return len(keys(server))

    registered = app.register_task(ClassBased())

    assert app.tasks[name].apply().get() == 1
    assert registered.apply((1,)).get() == 1
    assert registered.lock_key_for(1) == registered.lock_key_for(x=1, y=5)


def test_with_the_base_class_for_the_whole_app_celerys_own_tasks_take_no_lock(server: Server) -> None:
    app = Celery("whole", task_cls=SingletonTask, broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = server.url

    @app.task
    def body() -> int:
        return len(keys(server))

    assert body.apply().get() == 1
    assert app.tasks["celery.backend_cleanup"].apply().state == states.SUCCESS
    # Each item of the user's task takes one, as a call does.
    assert app.tasks["celery.starmap"].apply((body.s(), [(), ()])).get() == [1, 1]


def test_arguments_that_make_no_key_are_refused_where_they_are_published(app: Celery) -> None:
    @app.task(base=SingletonTask, serializer="pickle")
    def body(x: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="cannot be serialised"):
        body.delay(object())


def test_a_call_that_the_function_cannot_take_fails_as_celery_says(app: Celery) -> None:
    @app.task(base=SingletonTask)
    def body(x: Any) -> None: ...

    with pytest.raises(TypeError):
        body.delay()
    with pytest.raises(TypeError):
        body.apply(()).get()


@pytest.mark.parametrize("policy", ["reschedule", "raise", "run", "skip"])
def test_a_store_that_refuses_us_is_told_whatever_the_policy(app: Celery, server: Server, policy: str) -> None:
    ran = []
    app.conf.singleton_lock_url = server.url.replace("//", "//nobody:wr0ng@")

    @app.task(base=SingletonTask, lock_on_store_error=policy)
    def runs() -> None:
        ran.append(1)

    @app.task(base=SingletonTask, lock_on_store_error=policy, lock_mode="until_executed")
    def queues() -> None:
        ran.append(1)

    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        runs.apply().get()
    with pytest.raises(ConfigurationError, match="singleton_lock_url"):
        queues.apply_async()
    assert ran == []


def test_a_store_that_does_not_answer_is_an_error_that_names_it(app: Celery) -> None:
    port = free_port()
    app.conf.singleton_lock_url = f"redis://:secret@127.0.0.1:{port}/0"

    @app.task(base=SingletonTask, lock_on_store_error="raise")
    def body() -> None: ...

    with pytest.raises(StoreError, match=f"redis://127.0.0.1:{port}/0") as raised:
        body.apply().get()
    assert "secret" not in str(raised.value)


def test_a_mixin_that_calls_super_cooperates(app: Celery, server: Server) -> None:
    class WithContext(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return [super().__call__(*args, **kwargs)]

    class Outside(WithContext, SingletonTask):
        abstract = True

    class Inside(SingletonTask, WithContext):
        abstract = True

    for base in (Outside, Inside):

        @app.task(base=base, name=base.__name__)
        def task() -> int:
            return len(keys(server))

        assert task.apply().get() == [1]


def test_a_thread_of_a_body_knows_its_lease_by_its_context(app: Celery) -> None:
    @app.task(base=SingletonTask, bind=True)
    def body(self: Any) -> list[Any]:
        with ThreadPoolExecutor() as pool:
            bare = pool.submit(lambda: (self.lock.held, current_lease())).result()
            in_context = pool.submit(contextvars.copy_context().run, current_lease).result()
        return [bare, in_context is self.lock]

    assert body.apply().get() == [(False, None), True]


def test_the_retry_of_a_call_that_came_without_notes_is_as_old_as_its_run(app: Celery) -> None:
    app.conf.task_default_queue = uuid()
    began = []

    @app.task(base=SingletonTask, bind=True, max_retries=1)
    def body(self: Any) -> None:
        began.append(time.time_ns() // 1000)
        time.sleep(0.01)
        raise self.retry(countdown=0)

    # As by `send_task`, or by a publisher that does not have this library.
    task_id = uuid()
    tracer_of(body)(task_id, (), {}, {"id": task_id, "args": (), "kwargs": {}, "root_id": task_id})

    with app.connection_for_read() as connection, connection.SimpleQueue(app.conf.task_default_queue) as queue:
        again = queue.get(timeout=10)
    assert again.headers["singleton_lock"]["published"] <= began[0]
