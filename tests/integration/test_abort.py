"""A body whose lease is lost is told so in the middle of its work; and no other code of its process is."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from contextvars import Context
from queue import SimpleQueue
from typing import Any

import anyio
import pytest
import uvloop
from asgiref.sync import async_to_sync
from celery import Celery, states

from celery_singleton_lock import Lease, LockLost, SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.leases import interrupt
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.integration.conftest import here, in_a_thread
from tests.tracing import traced

Loop = asyncio.AbstractEventLoop
Work = Coroutine[Any, Any, None]
RunWork = Callable[[Callable[[], Work]], object]

LONG = 60.0


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("abort", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_url="memory://abort", singleton_lock_ttl=1)
    yield app
    app.close()
    store: Any = store_of(app)
    store.call("FLUSHALL")


def task_of(app: Celery, body: Callable[[Any], Any], **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name="sync", **options)
    def sync(self: Any, key: str = "k") -> Any:
        return body(self)

    return sync


def run(task: Any, *args: Any) -> Any:
    task_id, _ = traced(task, *args)
    return task.AsyncResult(task_id)


def lose(self: Any, lease: Lease | None = None) -> None:
    """Somebody breaks the lease of a run that does not wait for it."""
    lost, found = lease or self.lock, ()
    # On a machine that stands still the lease may have expired. Until its renewal there is nothing to break.
    while not found:
        found, _ = Inventory(store_of(self.app)).break_lock(lost.key, [lost.token], "alice", force=True)


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


def waiting(run_work: RunWork) -> Callable[[Any], None]:
    def waits(self: Any) -> None:
        lease, cleaned = self.lock, list[bool]()

        async def work() -> None:
            lose(self, lease)
            try:
                await asyncio.gather(asyncio.sleep(LONG), asyncio.sleep(LONG))
            finally:
                # A body may take its time to clean up.
                await asyncio.sleep(0.2)
                cleaned.append(True)

        try:
            run_work(work)
        finally:
            assert cleaned == [True]

    return waits


def in_loop(make: Callable[[], Loop]) -> RunWork:
    def run_work(work: Callable[[], Work]) -> None:
        with closing(make()) as loop:
            loop.run_until_complete(work())

    return run_work


def in_loop_of_another_thread(make: Callable[[], Loop]) -> RunWork:
    def run_work(work: Callable[[], Work]) -> None:
        with running(make()) as loop:
            asyncio.run_coroutine_threadsafe(work(), loop).result()

    return run_work


@contextmanager
def running(loop: Loop) -> Iterator[Loop]:
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def in_runner(work: Callable[[], Work]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


WAYS: dict[str, RunWork] = {
    "asyncio": lambda work: asyncio.run(work()),
    "uvloop": in_loop(uvloop.new_event_loop),
    "async_to_sync": lambda work: async_to_sync(work)(),
    "another thread": in_loop_of_another_thread(asyncio.new_event_loop),
}
MORE_WAYS: dict[str, RunWork] = {
    "run_until_complete": in_loop(asyncio.new_event_loop),
    "uvloop.run": lambda work: uvloop.run(work()),
    "runner": in_runner,
    "anyio": anyio.run,
    "another thread, uvloop": in_loop_of_another_thread(uvloop.new_event_loop),
}


def leaves_a_task_elsewhere(self: Any) -> None:
    with running(asyncio.new_event_loop()) as loop:
        left = asyncio.run_coroutine_threadsafe(asyncio.sleep(LONG), loop)
        try:
            computes(self)
        finally:
            left.cancel()


def runs_short_loops(self: Any) -> None:
    """One after the other: each is closed soon after it was found."""

    async def work() -> None:
        await asyncio.gather(*(asyncio.sleep(0.001 * number) for number in range(8)))

    lose(self)
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        asyncio.run(work())


def blocks_its_loop(self: Any) -> None:
    """A coroutine that never awaits: its loop cannot cancel it."""
    lease, cleaned = self.lock, list[bool]()

    async def work() -> None:
        lose(self, lease)
        end = time.monotonic() + LONG
        try:
            while time.monotonic() < end:
                time.sleep(0.01)
        finally:
            # Longer than the pause between two tries to reach it.
            time.sleep(1.5)
            cleaned.append(True)

    try:
        asyncio.run(work())
    finally:
        assert cleaned == [True]


BODIES = [
    *(computes, starts_threads, leaves_a_task_elsewhere, runs_short_loops),
    pytest.param(blocks_its_loop, marks=pytest.mark.prove),
    *(pytest.param(waiting(way), id=name) for name, way in WAYS.items()),
    *(pytest.param(waiting(way), id=name, marks=pytest.mark.prove) for name, way in MORE_WAYS.items()),
]


@pytest.fixture
def freed() -> Iterator[None]:
    """Free what the test has left, so that its complaints are ignored here and fail no later test."""
    yield
    gc.collect()


# The exception may strike while asyncio makes a loop, and such a loop complains as it is freed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("where", [here, in_a_thread])
@pytest.mark.parametrize("body", BODIES)
def test_a_run_ends_as_lost_whatever_it_is_at(app: Celery, body: Callable[[Any], None], where: Any) -> None:
    task, began = task_of(app, body), time.monotonic()

    result = where(lambda: run(task))

    assert time.monotonic() - began < LONG - 5
    assert result.state == states.FAILURE
    with pytest.raises(LockLost, match="expired"):
        result.get()


def test_a_body_that_no_early_try_has_reached_is_interrupted_later(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that starts threads may be, under load."""
    monkeypatch.setattr(interrupt, "_PAUSES", ())
    monkeypatch.setattr(interrupt, "_LATER_PAUSE", 0.1, raising=False)
    task = task_of(app, computes)

    assert in_a_thread(lambda: run(task)).state == states.FAILURE


@pytest.mark.prove
def test_no_run_hangs_that_is_told_of_its_loss_as_it_starts_a_thread(app: Celery) -> None:
    # On Python 3.11 one in twenty hung when the new thread got the exception: its starter waits until it runs.
    task, ended = task_of(app, starts_threads), SimpleQueue[str]()
    # Celery binds its tasks in whichever thread is the first, and the others would find them half bound.
    app.finalize()

    def series(number: int) -> None:
        for _ in range(6):
            ended.put(run(task, str(number)).state)

    for number in range(8):
        threading.Thread(target=series, args=(number,), daemon=True).start()

    assert [ended.get(timeout=LONG) for _ in range(48)] == [states.FAILURE] * 48


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
@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("kind", [None, asyncio.Runner])
def test_what_others_have_started_in_a_kept_loop_lives_on(app: Celery, where: Any, make: Any, kind: Any) -> None:
    async def start() -> "asyncio.Task[None]":
        return asyncio.create_task(asyncio.sleep(600))

    def play() -> tuple[Any, bool]:
        runner = kind(loop_factory=make) if kind else make()
        run_in = runner.run if kind else runner.run_until_complete
        # As the start of the process, or another run, would.
        of_others = Context().run(run_in, start())
        result = run(task_of(app, waiting(lambda work: run_in(work()))))
        run_in(asyncio.sleep(0))
        lives = not of_others.done()
        of_others.cancel()
        run_in(asyncio.sleep(0))
        runner.close()
        return result, lives

    result, lives = where(play)

    assert lives
    with pytest.raises(LockLost, match="expired"):
        result.get()


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


def test_a_tuple_that_another_thread_builds_meanwhile_is_built(app: Celery) -> None:
    is_over, failed = threading.Event(), list[Exception]()

    def build() -> None:
        while not is_over.is_set():
            try:
                tuple(time.sleep(0) or number for number in range(200))
            except SystemError as error:
                failed.append(error)

    task, neighbours = task_of(app, computes), [threading.Thread(target=build) for _ in range(2)]
    for each in neighbours:
        each.start()
    states_after = {run(task, str(number)).state for number in range(4)}
    is_over.set()
    for each in neighbours:
        each.join()

    assert (states_after, failed) == ({states.FAILURE}, [])


IN_THE_POOL_OF_GEVENT = """
from gevent import monkey; monkey.patch_all()
import time
import gevent
from celery import Celery
from celery_singleton_lock import LockLost, SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.redis.inventory import Inventory

app = Celery("abort", broker="memory://", backend="cache+memory://")
app.conf.update(singleton_lock_url="memory://abort", singleton_lock_ttl=1)

@app.task(base=SingletonTask, bind=True, name="body")
def body(self, is_long):
    if is_long:
        Inventory(store_of(app)).break_lock(self.lock.key, [self.lock.token], "alice", force=True)
        time.sleep(10)

body.apply((False,))  # the heartbeat begins in the main thread
print(gevent.get_hub().threadpool.apply(lambda: type(body.apply((True,)).result).__name__))
"""


def test_a_body_in_the_thread_pool_of_gevent_is_told_in_the_event_loop_of_its_thread() -> None:
    command = [sys.executable, "-W", "ignore", "-c", IN_THE_POOL_OF_GEVENT]

    done = subprocess.run(command, capture_output=True, text=True, timeout=180)

    assert (done.returncode, done.stdout.strip()) == (0, "LockLost"), done.stderr


LATER_TRACED = """
import sys
import threading
from celery import Celery
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.redis.inventory import Inventory

app = Celery("abort", broker="memory://", backend="cache+memory://")
app.conf.update(singleton_lock_url="memory://abort", singleton_lock_ttl=1)

@app.task(base=SingletonTask, bind=True, name="body")
def body(self):
    Inventory(store_of(app)).break_lock(self.lock.key, [self.lock.token], "alice", force=True)
    while not self.lock.lost:
        pass

def run():
    for _ in range(3):
        states.append(body.apply().state)

states = []
thread = threading.Thread(target=run)
thread.start()
thread.join()
sys.settrace(lambda *_: None)
print(len(states))
"""


def test_a_process_in_which_a_run_was_interrupted_can_be_traced_later() -> None:
    """As coverage and debuggers do."""
    command = [sys.executable, "-W", "ignore", "-c", LATER_TRACED]

    done = subprocess.run(command, capture_output=True, text=True, timeout=180)

    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr
