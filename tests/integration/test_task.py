"""`SingletonTask` inside one process: who takes a lock, what the body sees, and that nothing stays held."""

import asyncio
import gc
import inspect
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, states, uuid
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock import ConfigurationError, LockLost, SingletonTask, current_lease, signals
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim, Grant
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.servers import Server
from tests.tracing import traced
from tests.waiting import until


def held_by_somebody(app: Celery, key: str) -> Callable[[], Any]:
    store, claim = store_of(app), Claim(key, "token of the holder", 30, task_id="the-holder")
    assert isinstance(store.acquire(claim), Grant)
    return lambda: store.release(claim, None)


def keys(server: Server) -> list[str]:
    with server.client() as client:
        return list(client.scan_iter("*"))


class Parcel:
    """An argument that can be watched."""


def test_the_arguments_live_no_longer_than_the_run(app: Celery) -> None:
    @app.task(base=SingletonTask, lock_key=())
    def body(parcel: Parcel) -> None:
        assert parcel

    # The first run brings the scripts to the server.
    body.apply((Parcel(),))
    parcel = Parcel()
    watched = weakref.ref(parcel)
    gc.disable()
    try:
        body.apply((parcel,))
        del parcel
        assert watched() is None
    finally:
        gc.enable()


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
    assert 0 < seen["remaining"] <= 30
    assert (holder.key, holder.token, holder.fence) == (lease.key, lease.token, lease.fence)
    assert (holder.task_id, holder.task_name) == (result.id, body.name)
    assert (holder.pid, holder.hostname) == (os.getpid(), socket.gethostname())
    assert holder.acquired_at == lease.acquired_at
    assert abs(datetime.now(UTC) - lease.acquired_at) < timedelta(minutes=1)
    assert not lease.took_over
    assert not lease.lost
    assert (body.lock.held, current_lease(), keys(server)) == (False, None, [])


ENDINGS = [None, ValueError(), Ignore(), Reject("no", requeue=False), Retry("again"), SystemExit(1), MemoryError()]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: type(ending).__name__)
@pytest.mark.parametrize("throw", [False, True])
def test_however_the_body_ends_its_lock_is_free(app: Celery, server: Server, ending: Any, throw: bool) -> None:
    held = []

    @app.task(base=SingletonTask)
    def body() -> None:
        held.extend(keys(server))
        if ending is not None:
            raise ending

    with suppress(ValueError, Ignore, Reject, Retry, SystemExit, MemoryError):
        body.apply(throw=throw)

    assert len(held) == 1
    assert keys(server) == []


@pytest.mark.parametrize("mode", ["while_executing", "until_executing", "until_executed", "until_and_while_executing"])
def test_one_body_serves_each_mode_an_eager_run_and_a_direct_call(app: Celery, mode: str) -> None:
    @app.task(base=SingletonTask, bind=True, lock_mode=mode)
    def body(self: Any) -> tuple[bool, bool, bool]:
        self.lock.check()
        return self.lock.held, self.lock.fence > 0, self.lock.remaining() > 0

    assert body.apply().get() == ((False,) * 3 if mode == "until_executing" else (True,) * 3)
    assert body() == (False,) * 3


async def later() -> str:
    return "ran"


async def one_by_one() -> AsyncIterator[str]:
    yield "ran"


class Soon:
    def __await__(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize("unfinished", [later, one_by_one, Soon])
def test_work_that_a_body_leaves_to_somebody_else_is_refused(app: Celery, server: Server, unfinished: Any) -> None:
    class Awaiting(SingletonTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            result = super().__call__(*args, **kwargs)
            return asyncio.run(result) if inspect.iscoroutine(result) else result

    @app.task(base=Awaiting, name="unfinished")
    def body() -> Any:
        return unfinished()

    with pytest.raises(ConfigurationError, match=r"task unfinished: its body has returned a .*asyncio\.run"):
        body.apply(throw=True)
    assert keys(server) == []


def test_a_task_that_calls_itself_directly_goes_on_under_its_lease(app: Celery, server: Server) -> None:
    @app.task(base=SingletonTask, bind=True, lock_key=())
    def countdown(self: Any, number: int) -> list[Any]:
        here = [(current_lease(), self.lock)]
        return here + countdown(number - 1) if number else here

    leases = countdown.apply((3,)).get()

    assert len(leases) == 4
    assert len({id(lease) for pair in leases for lease in pair}) == 1
    assert keys(server) == []


def test_each_run_that_shares_a_request_with_another_has_a_lease_of_its_own(app: Celery) -> None:
    @app.task(base=SingletonTask, bind=True)
    def body(self: Any) -> tuple[str, bool]:
        (holder,) = self.lock_holders()
        return holder.task_id, self.lock.held

    request = Context(called_directly=False)
    body.request_stack.push(request)
    try:
        seen = []
        # As celery-aio-pool does it.
        for name in ("one", "two"):
            request.update(id=name, args=(), kwargs={})
            seen.append(body())
    finally:
        body.request_stack.pop()

    assert seen == [("one", True), ("two", True)]


def test_bytes_that_are_no_text_are_escaped_on_their_way_to_the_store(app: Celery, server: Server) -> None:
    @app.task(base=SingletonTask, bind=True, name="sync-\ud800", lock_name="sync", lock_label="{file}")
    def sync(self: Any, file: str) -> None:
        (holder,) = self.lock_holders(file)
        seen.append((self.lock.held, holder.hostname, holder.task_name, holder.label))

    seen = list[Any]()
    # As Python reads a host name, or a file name, that is not UTF-8.
    traced(sync, "b\udc80", hostname="w@\udcff")

    assert seen == [(True, r"w@\udcff", r"sync-\ud800", "b")]
    assert keys(server) == []


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
        server.flush()
        return "ran"

    signals.lock_lost.connect(lambda lease, reason, **_: lost.append((lease.key, reason)), sender=body, weak=False)
    signals.lock_released.connect(lambda lease, **_: released.append(lease), sender=body, weak=False)

    assert body.apply().get() == "ran"
    until(lambda: lost, "the receiver is told")
    assert released == []
    assert lost == [(body.lock_key_for(), "expired")]
    until(lambda: f"lock.lost key={body.lock_key_for()}" in caplog.text, "the log tells")


@pytest.mark.parametrize("on_lost", ["abort", "warn"])
def test_a_run_that_is_broken_is_no_error_and_who_asked_is_told(
    app: Celery, server: Server, caplog: pytest.LogCaptureFixture, on_lost: str
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")

    @app.task(base=SingletonTask, bind=True, lock_ttl=3, lock_on_lost=on_lost)
    def body(self: Any) -> str:
        Inventory(store_of(app)).break_lock(self.lock.key, [self.lock.token], "alice@ops-1")
        until(lambda: self.lock.lost, "it is told")
        # Long enough for an interrupt, which comes with "abort" alone.
        time.sleep(5 if on_lost == "abort" else 0.5)
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
    mine = [record for record in caplog.records if body.lock_key_for() in record.getMessage()]
    assert [record for record in mine if record.levelname == "ERROR"] == []
    assert body.lock_holders() == []


def test_a_lease_that_is_lost_while_a_retry_is_published_fails_the_task(app: Celery, server: Server) -> None:
    class LosesItsLease(SingletonTask):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            lease = current_lease()
            server.flush()
            until(lambda: lease.lost, "the holder knows")
            # The interrupt that follows comes between two bytecodes, on a machine that stands still after seconds.
            give_up_at = time.monotonic() + 20
            while time.monotonic() < give_up_at:
                time.sleep(0.01)
            return super().apply_async(*args, **options)

    queue = uuid()

    @app.task(base=LosesItsLease, bind=True, lock_ttl=1)
    def body(self: Any) -> None:
        self.retry(countdown=60, queue=queue)

    _, outcome = traced(body)

    assert outcome.state == states.FAILURE
    assert isinstance(outcome.retval, LockLost)


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


@pytest.mark.parametrize(("policy", "asked"), [("rerun", 1), ("replace", 1), ("skip", 0), ("reschedule", 0)])
def test_a_publisher_asks_once_for_the_time_of_the_store_where_the_newest_call_wins(
    app: Celery, server: Server, policy: Any, asked: int
) -> None:
    @app.task(base=SingletonTask, lock_on_conflict=policy, shared=False)
    def work(number: int) -> None: ...

    def commands() -> int:
        with server.client() as client:
            statistics = client.info("commandstats")
        return sum(one["calls"] for name, one in statistics.items() if name in ("cmdstat_time", "cmdstat_evalsha"))

    before = commands()
    for number in range(20):
        work.delay(number)

    assert commands() - before == asked


class TriesAgain(SingletonTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:  # noqa: BLE001 (as users write it)
            return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("policy", ["raise", "skip", "reschedule", "rerun", "replace"])
def test_a_second_try_of_a_call_whose_key_is_held_does_not_run(app: Celery, policy: str) -> None:
    bodies, queue = [], app.conf.task_default_queue

    @app.task(base=TriesAgain, lock_on_conflict=policy, lock_wait_timeout=2)
    def body() -> None:
        bodies.append(1)

    release = held_by_somebody(app, body.lock_key_for())
    _, outcome = traced(body, delivery_info={"exchange": "", "routing_key": queue})
    release()

    assert bodies == []
    is_over = policy in ("raise", "skip")
    assert outcome.state == (states.FAILURE if is_over else states.IGNORED)
    if not is_over:
        with app.connection_for_read() as connection:
            assert connection.default_channel.queue_declare(queue, passive=True).message_count == 1


def test_a_second_try_after_the_body_is_refused(app: Celery) -> None:
    bodies = []

    @app.task(base=TriesAgain, name="stumbling")
    def body() -> None:
        bodies.append(1)
        raise OSError("the first time")

    _, outcome = traced(body)

    assert bodies == [1]
    assert isinstance(outcome.retval, ConfigurationError)
    assert "task stumbling: TriesAgain.__call__ calls" in str(outcome.retval)
    assert body.lock_holders() == []
