"""`Lock`: the lock of the tutorials (timeout, identity, atomic release, expiry, semaphore, re-entrance), done right."""

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from contextvars import copy_context
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import (
    ConfigurationError,
    Lease,
    Lock,
    LockHeld,
    LockLost,
    SingletonLockError,
    SingletonTask,
    StoreError,
    signals,
)
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import RELEASED, Claim
from celery_singleton_lock.stores.redis.encoding import ACQUIRE
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.forks import fork_in_c, in_a_fork
from tests.integration.conftest import here, in_a_thread
from tests.monitor import Monitor
from tests.proxy import Proxy
from tests.servers import Server
from tests.tracing import traced
from tests.waiting import until

# One for all tests: a server is the same from the first test to the last.
store_at = cache(store_from_url)


def holders(url: str, lock: Lock) -> int:
    return len(store_at(url).holders(lock.key))


def test_the_context_manager_releases_however_its_block_ends(url: str) -> None:
    lock = Lock("stock", url=url)

    def fail_inside() -> None:
        with lock as lease:
            assert lease.remaining() > 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()

    assert holders(url, lock) == 0
    with lock as lease:
        lease.release()
    assert holders(url, lock) == 0


def test_a_block_that_a_signal_kept_from_ending_keeps_nobody_out_for_longer_than_a_ttl(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a soft time limit does that raises before the first instruction of `__exit__`."""

    def strike(*_: object) -> None:
        raise InterruptedError

    def interrupted() -> None:
        monkeypatch.setattr(Lock, "__exit__", strike)
        try:
            with Lock("stock", url=url, ttl=1):
                pass
        except InterruptedError:
            monkeypatch.undo()

    with Lock("stock", url=url):
        # The first request to a store in memory leaves a cycle, which would keep the lease until a collection.
        pass
    interrupted()
    assert holders(url, Lock("stock", url=url)) == 1
    until(lambda: holders(url, Lock("stock", url=url)) == 0, "its lease has run out", timeout=5)


@pytest.mark.parametrize("timeout", [0, timedelta(seconds=0.2)])
def test_a_wait_ends_with_its_timeout_and_leaves_no_turn_behind(url: str, timeout: Any) -> None:
    lock, began = Lock("stock", url=url, timeout=timeout), time.monotonic()
    with Lock("stock", url=url) as lease:
        with pytest.raises(LockHeld) as refused, lock:
            pass
        assert refused.value.key == lease.key
        assert lock.acquire(timeout=timeout) is None
        assert 0.4 * bool(timeout) <= time.monotonic() - began < 10
        assert lock.state().waiting == 0

    with lock as mine:
        assert mine.held


def test_a_waiter_is_woken_and_does_not_poll(server: Server) -> None:
    lock = Lock("stock", url=server.url)

    def wait() -> float:
        with lock:
            return time.monotonic()

    def scripts_run() -> int:
        with server.client() as client:
            stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))

    with ThreadPoolExecutor(1) as pool, lock:
        got = pool.submit(wait)
        until(lambda: lock.state().waiting == 1, "it queues")
        before = scripts_run()
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 1.0, "a while has passed")
        # If the machine stands still meanwhile, the lease may be renewed, and a waiter may look.
        assert scripts_run() <= before + 3
        released = time.monotonic()

    assert got.result(20) - released < 10


HOLD = """
import sys
import threading
from celery_singleton_lock import Lock
lock = Lock("stock", url=sys.argv[1], ttl=2)
lock.acquire()
for _ in range(int(sys.argv[2])):
    threading.Thread(target=lock.acquire, daemon=True).start()
print("held", flush=True)
sys.stdin.read()
"""


def test_when_the_holder_dies_and_others_that_wait_with_it_a_waiter_gets_the_lock_within_the_ttl(
    server: Server,
) -> None:
    command = [sys.executable, "-c", HOLD, server.url, "12"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            until(lambda: Lock("stock", url=server.url).state().waiting == 12, "they queue")
        finally:
            holder.kill()
    killed = time.monotonic()

    lease = Lock("stock", url=server.url, ttl=2).acquire(timeout=20)

    assert lease.took_over
    assert time.monotonic() - killed < 2 + 8
    lease.release()


def test_a_release_by_a_stranger_or_twice_is_an_error_and_frees_nothing(url: str) -> None:
    lock = Lock("stock", url=url)
    lease = lock.acquire()

    with ThreadPoolExecutor(1) as stranger, pytest.raises(SingletonLockError, match="not held by this thread"):
        stranger.submit(lock.release).result(10)
    assert holders(url, lock) == 1

    lock.release()
    successor = Lock("stock", url=url)
    successor.acquire()
    with pytest.raises(SingletonLockError, match="not held by this thread"):
        lock.release()
    with pytest.raises(SingletonLockError, match="released already"):
        lease.release()
    with pytest.raises(LockLost, match="released"):
        lease.check()
    assert holders(url, lock) == 1


def test_a_forked_child_holds_nothing_and_can_free_nothing(server: Server) -> None:
    lock = Lock("stock", url=server.url)
    lease = lock.acquire()

    assert in_a_fork(lambda: (lease.held, lease.remaining())) == "(False, 0.0)"
    assert "LockLost" in in_a_fork(lease.check)
    assert f"belongs to the process {os.getpid()}" in in_a_fork(lease.release)
    assert "not held by this thread" in in_a_fork(lock.release)
    assert "cannot be left here" in in_a_fork(lambda: lock.__exit__(None, None, None))
    assert in_a_fork(lambda: lock.__exit__(SystemExit, SystemExit(), None)) == "False"
    assert in_a_fork(lambda: lock.acquire(blocking=False)) == "None"

    assert holders(server.url, lock) == 1
    lock.release()
    assert in_a_fork(lambda: lock.acquire(blocking=False) is not None) == "True"


# CPython hangs in a child that was forked without its hooks while another thread waited for the GIL.
@pytest.mark.parametrize(
    "fork", [pytest.param(os.fork, id="python"), pytest.param(fork_in_c, id="c", marks=pytest.mark.nightly)]
)
def test_a_forked_child_renews_counts_and_reports_by_itself(server: Server, fork: Any) -> None:
    lock, heard = Lock("forked", url=server.url, ttl=6), threading.Event()
    # The parent's threads run, and the child has none of them.
    with lock:
        background.submit(heard.set)
        assert heard.wait(20)

    def hold() -> tuple[bool, bool, bool]:
        heard = threading.Event()
        with lock as lease:
            until(lambda: lease.remaining() < 5, "time passes")
            until(lambda: lease.lost or lease.remaining() > 5, "it is renewed")
            background.submit(heard.set)
            return lease.held, lease.lost, heard.wait(20)

    assert in_a_fork(hold, fork) == "(True, False, True)"


def test_a_lost_lease_tells_and_raises_nothing_by_itself(server: Server) -> None:
    told: list[Any] = []

    def receiver(lease: Any = None, reason: Any = None, **_: Any) -> None:
        told.append((lease, reason))

    signals.lock_lost.connect(receiver, sender=Lock)
    with Lock("stock", url=server.url, ttl=1) as lease:
        server.flush()
        until(lambda: lease.lost, "the loss is noticed")
        with pytest.raises(LockLost, match="expired"):
            lease.check()
    until(lambda: [whose for whose, _ in told if whose is lease], "it is told")
    signals.lock_lost.disconnect(receiver, sender=Lock)

    assert [(whose, reason) for whose, reason in told if whose is lease] == [(lease, "expired")]


BAD = [{"ttl": 0}, {"ttl": -1}, {"ttl": "soon"}, {"limit": 0}, {"limit": 1.5}, {"timeout": -1}, {"timeout": "long"}]
# The last is how Python reads the name of a file that is not UTF-8.
BAD += [{"reentrant": "yes"}, {"app": "shop"}, {"app": ""}]
BAD_NAMES = ["", "n" * 201, None, 7, "\udc80"]
BAD_WAITS: list[dict[str, Any]] = [{"timeout": -1}, {"blocking": False, "timeout": 1}, {"timeout": "long"}]


def test_bad_arguments_are_refused_by_name() -> None:
    for name in BAD_NAMES:
        with pytest.raises(ConfigurationError, match="lock_name"):
            Lock(name, url="memory://")
    for arguments in BAD:
        with pytest.raises(ConfigurationError, match=next(iter(arguments))):
            Lock("stock", url="memory://", **arguments)
    for arguments in BAD_WAITS:
        with pytest.raises(ConfigurationError, match="timeout"):
            Lock("stock", url="memory://").acquire(**arguments)


GREEN = """
import sys
{patch}
from celery_singleton_lock import Lock
import time

lock, order, shared = Lock("green", url=sys.argv[1], ttl=6), [], [0]

def body(number):
    with lock as lease:
        order.append(number)
        seen = shared[0]
        time.sleep(0.4)
        shared[0] = seen + 1
        lease.check()

{run}
[one.join() for one in globals().get("threads", ())]
assert sorted(order) == list(range(5)), order
assert shared == [5], shared
again = Lock("green", url=sys.argv[1], ttl=6, reentrant=True)
with again as outer, again as inner:
    assert outer is inner
    for renewed in (False, True):
        while (outer.remaining() > 5) != renewed:
            time.sleep(0.01)
            outer.check()
print("well")
"""


@pytest.mark.prove
@pytest.mark.parametrize(
    ("patch", "run"),
    [
        (
            "from gevent import monkey; monkey.patch_all()\nimport gevent",
            "gevent.joinall([gevent.spawn(body, n) for n in range(5)], raise_error=True)",
        ),
        (
            "from gevent import monkey; monkey.patch_all(thread=False)\nimport threading",
            "threads = [threading.Thread(target=body, args=(n,)) for n in range(5)]\n[one.start() for one in threads]",
        ),
        (
            "import eventlet; eventlet.monkey_patch()",
            "[thread.wait() for thread in [eventlet.spawn(body, n) for n in range(5)]]",
        ),
    ],
    ids=["gevent", "gevent without threads", "eventlet"],
)
def test_greenlets_exclude_one_another(server: Server, patch: str, run: str) -> None:
    script = GREEN.format(patch=patch, run=run)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, server.url], capture_output=True, text=True, timeout=180
    )

    # A machine that stands still makes a heartbeat late, and the log tells.
    assert (done.stdout, re.sub(r"lock\.late .*\n", "", done.stderr)) == ("well\n", "")


HALF_PATCHED = """
import sys
{patch}
from celery_singleton_lock import ConfigurationError, Lock

lock = Lock("half", url=sys.argv[1])
for wait in (lock.__enter__, lock.acquire):
    try:
        wait()
    except ConfigurationError as error:
        print(error)
lock.acquire(blocking=False).release()
"""


@pytest.mark.parametrize(
    "patch",
    [
        "from gevent import monkey; monkey.patch_socket()",
        pytest.param("from gevent import monkey; monkey.patch_all(select=False)", marks=pytest.mark.prove),
        pytest.param("from gevent import monkey; monkey.patch_thread()", marks=pytest.mark.prove),
        "import eventlet; eventlet.monkey_patch(socket=True)",
    ],
)
def test_a_wait_that_would_stop_all_greenlets_is_refused(valkey: Server, patch: str) -> None:
    script = HALF_PATCHED.format(patch=patch)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, valkey.url], capture_output=True, text=True, timeout=180
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("would stop all its greenlets") == 2
    assert "monkey.patch_all()" in done.stdout


TTL = 7.0
LONGER = 7.3
"""Its key stays in the store for two ttls, so the machine may stand still for the rest."""


def hold_the_gil(seconds: float) -> None:
    """As a computation in C does that lets no other thread of its process run."""
    ctypes.PyDLL(None).usleep(round(seconds * 1_000_000))


def test_after_a_computation_that_stopped_the_heartbeat_a_check_asks_and_the_heartbeat_waits_for_a_far_store(
    server: Server,
) -> None:
    with Proxy(server.port) as proxy, Lock("far", url=proxy.url, ttl=TTL) as far, ExitStack() as stack:
        kept, deleted, broken = (stack.enter_context(Lock(name, url=server.url, ttl=TTL)) for name in "abc")
        proxy.delay(0.1)
        with server.client() as client:
            client.delete(deleted.key)
        Inventory(store_at(server.url)).break_lock(broken.key, [broken.token], "alice")
        hold_the_gil(LONGER)

        assert min(each.remaining() for each in (kept, deleted, broken)) >= 0
        kept.check()
        assert kept.remaining() > 0
        with pytest.raises(LockLost, match="expired"):
            deleted.check()
        with pytest.raises(LockLost, match="broken"):
            broken.check()
        until(lambda: far.remaining() or far.lost, "the heartbeat has asked")
        assert not far.lost


@pytest.mark.prove
def test_a_request_that_arrives_after_its_release_leaves_nothing(server: Server) -> None:
    lock = Lock("overtaken", url=server.url)
    with Proxy(server.port) as proxy:
        held_back = Lock("overtaken", url=proxy.url)
        # The server has to know the script, so that the request is one with its digest.
        with held_back:
            pass
        proxy.hold(ACQUIRE.digest.encode())
        with pytest.raises(StoreError):
            held_back.acquire()
        tried = threading.Event()
        background.submit(tried.set)
        assert tried.wait(20), "it was released once"
        with Monitor(server) as monitor:
            proxy.let_go()
            until(lambda: monitor.about(ACQUIRE.digest), "the request has arrived")

        until(lambda: lock.acquire(blocking=False), "the lock is free", timeout=10)


# Three stretches of a ttl that outlasts a machine's pause, which would be one more stretch. test_told sees the line.
@pytest.mark.prove
def test_a_late_heartbeat_is_told_once_for_each_stretch_and_never_less_than_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(server.port) as proxy, Lock("crunch", url=proxy.url, ttl=TTL) as lease:
        proxy.delay(0.6)
        for _ in range(3):
            hold_the_gil(LONGER)
            until(lambda: lease.remaining() > 0 or lease.lost, "the heartbeat has asked")
    until(lambda: "lock.late" in caplog.text, "the log tells")

    late = [float(by) for by in re.findall(r"lock\.late .* late=(\S+)", caplog.text)]
    assert 1 <= len(late) <= 3
    assert min(late) > 0


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
    assert holders(url, lock) == 0
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
    assert holders(url, lock) == 0


def test_the_blocks_of_a_reentrant_lock_end_in_any_order(url: str) -> None:
    lock = Lock("stock", url=url, reentrant=True)
    first, second = dependency(lock), dependency(lock)
    lease = next(first)

    assert next(second) is lease
    first.close()
    assert lease.held
    second.close()
    assert holders(url, lock) == 0


def test_the_end_of_a_block_that_was_lost_takes_no_lease_from_another_one(url: str) -> None:
    """Also where nothing says which of the two ends: neither was entered by a `with` statement, nor here."""
    lock = Lock("stock", url=url, ttl=1)
    lost, stack = in_a_context(lock.__enter__), ExitStack()
    assert store_at(url).release(Claim(lock.key, lost.token, 1), None) == RELEASED
    until(lambda: lost.lost, "it is lost")
    lease = in_a_context(lambda: stack.enter_context(lock))

    in_a_context(lambda: lock.__exit__(None, None, None))
    assert lease.held
    in_a_thread(stack.close)
    assert holders(url, lock) == 0


def test_a_block_gives_back_what_it_has_taken_and_nothing_else(url: str) -> None:
    lock = Lock("gates", url=url, limit=3)

    with lock as mine:
        other = lock.acquire()
    assert not mine.held
    assert other.held

    with lock as outer, lock as inner:
        outer.release()
    assert not inner.held
    lock.release()
    assert holders(url, lock) == 0


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
    assert lock.acquire() is lease

    first(lock, lease)
    assert lease.held
    assert holders(url, lock) == 1
    second(lock, lease)
    assert not lease.held
    assert holders(url, lock) == 0


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
        assert holders(url, left) == 0
        assert holders(url, before) == 1
    told = [record.getMessage() for record in caplog.records if record.msg.startswith("lock.left_held")]
    assert [each.startswith(f"lock.left_held key={left.key} task_id={sent}: ") for each in told] == [True] * len(kept)
