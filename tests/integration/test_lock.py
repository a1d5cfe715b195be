"""`Lock`: the lock of the tutorials (timeout, identity, atomic release, expiry, semaphore, re-entrance), done right."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import (
    ConfigurationError,
    Lease,
    Lock,
    LockLost,
    SingletonLockError,
    SingletonTask,
    StoreError,
    signals,
)
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Claim, Conflict, Facts
from tests.forks import in_a_fork
from tests.proxy import Proxy
from tests.servers import SERVERS, Server, free_port
from tests.waiting import until

STORES = (*SERVERS, "memory")


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest) -> str:
    """An empty store of each kind, in turn."""
    if request.param == "memory":
        store_from_url("memory://lock").clear()  # type: ignore[attr-defined]
        return "memory://lock"
    server = request.getfixturevalue(f"{request.param}_process")
    with server.client() as client:
        client.flushall()
    return str(server.url)


@pytest.fixture
def in_threads() -> Iterator[Callable[..., threading.Thread]]:
    """Starts threads, and sees to it that all of them have ended well."""
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def start(body: Callable[..., Any], *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                body(*args)
            except BaseException as error:
                failures.append(error)
                raise

        thread = threading.Thread(target=run, daemon=True)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not failures


# One for all tests: a server is the same from the first test to the last.
store_at = cache(store_from_url)


def holders(url: str, lock: Lock) -> int:
    return len(store_at(url).holders(lock.key))


def waiting(server: Server, lock: Lock) -> int:
    """How many are in the lock's queue."""
    with server.client() as client:
        return sum(1 for field in client.hkeys(lock.key) if field[0] == "q" and field[1:].isdecimal())


@pytest.mark.parametrize("by", ["lock", "lease", "a block"])
def test_each_release_is_told(url: str, by: str) -> None:
    lock, released = Lock("told", url=url), []

    def receiver(lease: Any = None, **_: Any) -> None:
        released.append(lease.key)

    signals.lock_released.connect(receiver, sender=Lock)
    if by == "a block":
        with lock:
            assert released == []
    else:
        lease = lock.acquire()
        assert lease is not None
        (lock if by == "lock" else lease).release()

    assert released == [lock.key]


def test_a_lock_is_held_from_acquire_to_release(url: str) -> None:
    lock, other = Lock("stock", url=url), Lock("stock", url=url)

    lease = lock.acquire()

    assert isinstance(lease, Lease)
    assert lease.held
    assert other.acquire(blocking=False) is None
    lock.release()
    assert not lease.held
    assert other.acquire(blocking=False) is not None
    other.release()
    assert holders(url, lock) == 0


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


def test_acquire_gives_up_after_its_timeout_and_leaves_no_turn_behind(url: str) -> None:
    with Lock("stock", url=url):
        began = time.monotonic()
        assert Lock("stock", url=url).acquire(timeout=0.2) is None
        assert 0.2 <= time.monotonic() - began < 5

    assert Lock("stock", url=url).acquire(blocking=False) is not None


def test_names_do_not_disturb_one_another(url: str) -> None:
    with Lock("stock", url=url), Lock("orders", url=url) as lease:
        assert lease.held


def test_threads_that_share_one_object_exclude_one_another(url: str, in_threads: Any) -> None:
    lock, sold, buyers, rounds = Lock("tickets", url=url), [0], 8, 10

    def buy() -> None:
        for _ in range(rounds):
            with lock:
                seen = sold[0]
                time.sleep(0)
                sold[0] = seen + 1

    threads = [in_threads(buy) for _ in range(buyers)]
    for thread in threads:
        thread.join(30)

    assert sold == [buyers * rounds]


def test_waiters_are_served_in_the_order_of_their_arrival(server: Server, in_threads: Any) -> None:
    lock, served = Lock("stock", url=server.url), []

    def wait(number: int) -> None:
        with lock:
            served.append(number)

    with lock:
        for number in range(8):
            in_threads(wait, number)
            until(lambda n=number: waiting(server, lock) == n + 1, "it queues")  # type: ignore[misc]

    until(lambda: len(served) == 8, "all are served")
    assert served == list(range(8))


def test_a_newcomer_does_not_overtake_a_waiter_whose_turn_has_come(server: Server) -> None:
    lock = Lock("stock", url=server.url, ttl=30)
    lease = lock.acquire()
    assert lease is not None
    store, claim = store_at(server.url), Claim(lock.key, "waiter", 30.0)
    with store.waiter(claim) as waiter:
        waiter.ask()
        lock.release()

        assert lock.acquire(blocking=False) is None
        assert not isinstance(waiter.ask(), float)
    store.release(claim, None)


def test_a_waiter_is_woken_and_does_not_poll(server: Server, in_threads: Any) -> None:
    lock, got = Lock("stock", url=server.url), []

    def wait() -> None:
        with lock:
            got.append(time.monotonic())

    def scripts_run() -> int:
        with server.client() as client:
            stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))

    with lock:
        in_threads(wait)
        until(lambda: waiting(server, lock) == 1, "it queues")
        before = scripts_run()
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 1.0, "a while has passed")
        assert scripts_run() == before
        released = time.monotonic()
    until(lambda: got, "it is served")

    assert got[0] - released < 10


HOLD = """
import sys
from celery_singleton_lock import Lock
lock = Lock("stock", url=sys.argv[1], ttl=float(sys.argv[2]), limit=int(sys.argv[3]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that acquire the lock; kills what is left of them."""
    processes = []

    def start(url: str, ttl: float = 2, limit: int = 1) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, url, str(ttl), str(limit)]
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(popen)
        return popen

    yield start
    for popen in processes:
        popen.kill()
        popen.communicate()


def test_a_waiter_that_died_is_passed_over(server: Server, process: Any, in_threads: Any) -> None:
    lock, served = Lock("stock", url=server.url, ttl=30), []

    def wait() -> None:
        with lock:
            served.append(time.monotonic())

    lock.acquire()
    dead = process(server.url, ttl=30)
    until(lambda: waiting(server, lock) == 1, "the one that will die queues")
    in_threads(wait)
    until(lambda: waiting(server, lock) == 2, "the other one queues")
    dead.kill()
    dead.wait()
    released = time.monotonic()
    lock.release()

    until(lambda: served, "the next one is served", timeout=5)
    assert served[0] - released < 5


def test_when_the_holder_dies_a_waiter_gets_the_lock_within_the_ttl(server: Server, process: Any) -> None:
    holder = process(server.url, ttl=2)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    killed = time.monotonic()

    lease = Lock("stock", url=server.url, ttl=2).acquire(timeout=20)

    assert lease is not None
    assert lease.took_over
    assert time.monotonic() - killed < 2 + 8
    lease.release()


def test_as_many_hold_a_semaphore_as_its_limit_says(url: str) -> None:
    locks = [Lock("gates", url=url, limit=3) for _ in range(4)]
    leases = [lock.acquire(blocking=False) for lock in locks]

    assert [lease is not None for lease in leases] == [True, True, True, False]
    locks[1].release()
    assert locks[3].acquire(blocking=False) is not None
    assert holders(url, locks[0]) == 3


def test_a_dead_holder_of_a_semaphore_frees_its_one_place(server: Server, process: Any) -> None:
    survivor = Lock("stock", url=server.url, ttl=2, limit=2)
    survivor.acquire()
    dead = process(server.url, ttl=2, limit=2)
    assert dead.stdout.readline() == "held\n"
    dead.kill()

    lock = Lock("stock", url=server.url, ttl=2, limit=2)
    lease = lock.acquire(timeout=10)

    assert lease is not None
    assert lease.took_over
    assert Lock("stock", url=server.url, ttl=2, limit=2).acquire(blocking=False) is None
    assert holders(server.url, lock) == 2


def test_a_caller_with_a_smaller_limit_waits_for_more_to_leave(url: str) -> None:
    wide, narrow = Lock("gates", url=url, limit=3), Lock("gates", url=url, limit=2)

    with wide, wide:
        assert narrow.acquire(blocking=False) is None
        with wide:
            pass
    with wide:
        assert narrow.acquire(blocking=False) is not None


def test_a_reentrant_lock_is_free_after_as_many_releases_as_acquires(url: str) -> None:
    lock, other = Lock("stock", url=url, reentrant=True), Lock("stock", url=url)

    with lock as outer, lock as inner:
        assert inner is outer
        assert lock.acquire() is outer
        lock.release()
        assert outer.held

    assert other.acquire(blocking=False) is not None


def test_a_lease_that_was_released_is_not_re_entered(url: str) -> None:
    lock = Lock("stock", url=url, reentrant=True)
    first = lock.acquire()
    assert first is not None
    first.release()

    with lock as second:
        assert second is not first
        assert second.held


def test_a_lease_that_was_lost_is_not_re_entered(server: Server) -> None:
    lock = Lock("stock", url=server.url, ttl=1, reentrant=True)

    with lock as lost:
        with server.client() as client:
            client.flushall()
        until(lambda: lost.lost, "the loss is noticed")
        with lock as again:
            assert again is not lost
            assert again.held
        assert not again.held
    assert holders(server.url, lock) == 0


def test_a_lease_that_was_asked_to_make_way_is_re_entered_until_it_has(url: str) -> None:
    lock = Lock("stock", url=url, ttl=1, reentrant=True)

    with lock as lease:
        ask_to_make_way(url, lock)
        until(lambda: lease.lost, "it has heard")
        assert (lease.lost_reason, lease.held, lease.remaining()) == ("replaced", False, 0.0)
        assert lock.acquire(timeout=0.2) is lease
        lock.release()
        assert holders(url, lock) == 1
    assert holders(url, lock) == 0


def test_a_lease_that_was_asked_to_make_way_and_then_lost_is_not_re_entered(server: Server) -> None:
    lock = Lock("stock", url=server.url, ttl=6, reentrant=True)

    with lock as lease:
        ask_to_make_way(server.url, lock)
        until(lambda: lease.lost, "it has heard")
        with server.client() as client:
            client.flushall()
        until(lambda: took_another(lock, lease), "the loss is noticed", timeout=4)


def took_another(lock: Lock, than: Lease) -> bool:
    """A newly taken lease, and not the one that this thread has."""
    with lock as again:
        return again is not than


def ask_to_make_way(url: str, lock: Lock) -> None:
    """As a task does that replaces."""
    facts = Facts("successor")
    successor = Claim(lock.key, "successor", 30.0, facts=facts, succeeds="replace", supersedes_for=60.0, asked=True)
    conflict = store_at(url).acquire(successor)
    assert isinstance(conflict, Conflict)
    assert conflict.successor == "successor"


def test_another_thread_does_not_re_enter(url: str, in_threads: Any) -> None:
    lock, seen = Lock("stock", url=url, reentrant=True), []

    with lock:
        in_threads(lambda: seen.append(lock.acquire(blocking=False))).join(10)

    assert seen == [None]


def test_without_reentrant_a_second_acquire_competes_with_the_first(url: str) -> None:
    lock = Lock("stock", url=url)

    with lock:
        assert lock.acquire(timeout=0.1) is None


def test_a_release_by_a_stranger_or_twice_is_an_error_and_frees_nothing(url: str, in_threads: Any) -> None:
    lock, errors = Lock("stock", url=url), []
    lease = lock.acquire()
    assert lease is not None

    def release_as_a_stranger() -> None:
        try:
            lock.release()
        except SingletonLockError as error:
            errors.append(str(error))

    in_threads(release_as_a_stranger).join(10)
    assert "not held by this thread" in errors[0]
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


def test_a_block_that_ends_where_nothing_is_held_says_so(url: str, in_threads: Any) -> None:
    lock = Lock("stock", url=url)
    told = []

    def leave() -> None:
        with pytest.raises(SingletonLockError) as caught:
            lock.__exit__(None, None, None)
        told.append(str(caught.value))

    with lock:
        in_threads(leave).join()
        assert holders(url, lock) == 1
    with lock:
        lock.release()

    assert "not held by this thread" in told[0]
    assert holders(url, lock) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_holds_nothing_and_can_free_nothing(server: Server) -> None:
    lock = Lock("stock", url=server.url)
    lease = lock.acquire()
    assert lease is not None

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


def test_a_lease_is_renewed_while_it_is_held(server: Server) -> None:
    lock = Lock("stock", url=server.url, ttl=3)

    with lock as lease:
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 4, "more than the ttl has passed")
        lease.check()
        assert holders(server.url, lock) == 1


def test_a_lost_lease_tells_and_raises_nothing_by_itself(server: Server) -> None:
    told: list[Any] = []

    def receiver(lease: Any = None, reason: Any = None, **_: Any) -> None:
        told.append((lease, reason))

    signals.lock_lost.connect(receiver, sender=Lock)
    with Lock("stock", url=server.url, ttl=1) as lease:
        with server.client() as client:
            client.flushall()
        until(lambda: lease.lost, "the loss is noticed")
        with pytest.raises(LockLost, match="expired"):
            lease.check()
    until(lambda: [whose for whose, _ in told if whose is lease], "it is told")
    signals.lock_lost.disconnect(receiver, sender=Lock)

    assert [(whose, reason) for whose, reason in told if whose is lease] == [(lease, "expired")]


class SlowHandler(logging.Handler):
    """One that calls, which takes its time."""

    def __init__(self, call: Callable[[str], None]) -> None:
        super().__init__()
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        self._call(record.getMessage())


@pytest.mark.prove
@pytest.mark.parametrize("by", ["a receiver", "a handler of the log"])
def test_who_takes_his_time_to_hear_of_a_loss_starves_no_renewal(valkey: Server, by: str) -> None:
    kept, a, b = (Lock(name, url=valkey.url, ttl=2) for name in ("kept", "a", "b"))
    told: list[str] = []

    def hear(text: str) -> None:
        # What other tests have left may be lost meanwhile.
        for key in (a.key, b.key):
            if key in text:
                told.append(key)
                time.sleep(2.5 if len(told) == 1 else 0)

    def receiver(lease: Any = None, **_: Any) -> None:
        hear(lease.key)

    log, handler = logging.getLogger("celery_singleton_lock"), SlowHandler(hear)
    if by == "a receiver":
        signals.lock_lost.connect(receiver, sender=Lock)
    else:
        log.addHandler(handler)
    try:
        with kept as lease, a as first, b as second, valkey.client() as client:
            client.delete(first.key)
            until(lambda: first.lost, "the first loss is noticed")
            client.delete(second.key)
            gaps: list[bool] = []
            until(lambda: gaps.append(lease.remaining() == 0) or len(told) >= 2, "both are told")
        assert not any(gaps)
        assert told == [a.key, b.key]
    finally:
        signals.lock_lost.disconnect(receiver, sender=Lock)
        log.removeHandler(handler)


def test_stores_that_do_not_answer_cost_the_leases_of_another_nothing(valkey: Server) -> None:
    with ExitStack() as stack:
        kept = stack.enter_context(Lock("kept", url=valkey.url, ttl=2))
        # One after the other, they would take longer than the ttl of the one that is kept.
        proxies = [stack.enter_context(Proxy(valkey.port)) for _ in range(4)]
        cut_off = [stack.enter_context(Lock(f"of {proxy.port}", url=proxy.url, ttl=3)) for proxy in proxies]
        for proxy in proxies:
            proxy.black_hole()

        gaps: list[bool] = []
        until(lambda: gaps.append(kept.remaining() == 0) or all(lease.lost for lease in cut_off), "they are lost")

        assert not any(gaps)
        for proxy in proxies:
            proxy.forward()


def test_a_store_that_does_not_answer_is_an_error_after_a_bounded_time() -> None:
    lock = Lock("stock", url=f"redis://127.0.0.1:{free_port()}/0")
    began = time.monotonic()

    with pytest.raises(StoreError):
        lock.acquire()

    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["", "n" * 201, None, 7])
def test_a_bad_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="lock_name"):
        Lock(name, url="memory://")


@pytest.mark.parametrize("arguments", [{"ttl": 0}, {"ttl": -1}, {"ttl": "soon"}, {"limit": 0}, {"limit": 1.5}])
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any]) -> None:
    ((name, _),) = arguments.items()

    with pytest.raises(ConfigurationError, match=name):
        Lock("stock", url="memory://", **arguments)


@pytest.mark.parametrize("arguments", [{"timeout": -1}, {"blocking": False, "timeout": 1}, {"timeout": "long"}])
def test_bad_timeouts_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="timeout"):
        Lock("stock", url="memory://").acquire(**arguments)


def test_a_task_and_a_lock_of_one_name_exclude_one_another(server: Server) -> None:
    app = Celery("lock", set_as_current=False)
    app.conf.singleton_lock_url = server.url

    @app.task(base=SingletonTask, lock_name="stock", lock_key=(), lock_skip_result="skipped")
    def count_stock() -> str:
        return "counted"

    with Lock("stock", app=app):
        assert count_stock.apply().get() == "skipped"
    assert count_stock.apply().get() == "counted"


GREEN = """
import sys
{patch}
from celery_singleton_lock import Lock
import time

lock, order, shared = Lock("green", url=sys.argv[1], ttl=3), [], [0]

def body(number):
    with lock as lease:
        order.append(number)
        seen = shared[0]
        time.sleep(0.4)
        shared[0] = seen + 1
        lease.check()

{run}
assert sorted(order) == list(range(5)), order
assert shared == [5], shared
again = Lock("green", url=sys.argv[1], ttl=3, reentrant=True)
with again as outer, again as inner:
    assert outer is inner
    time.sleep(3.5)
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
            "import eventlet; eventlet.monkey_patch()",
            "[thread.wait() for thread in [eventlet.spawn(body, n) for n in range(5)]]",
        ),
    ],
    ids=["gevent", "eventlet"],
)
def test_greenlets_exclude_one_another(server: Server, patch: str, run: str) -> None:
    script = GREEN.format(patch=patch, run=run)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, server.url], capture_output=True, text=True, timeout=60
    )

    assert done.stdout == "well\n", done.stderr


FORKS = """
import os, sys, time
from celery_singleton_lock import Lock
lease = Lock("of the parent", url=sys.argv[1], ttl=1).acquire()
if os.fork() == 0:
    own = Lock("of the child", url=sys.argv[1], ttl=1).acquire()
    print("held", flush=True)
    sys.stdin.read()
    own.check()
    print("kept", flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_child_renews_its_own_lease_and_not_that_of_its_parent(server: Server) -> None:
    parent, child = (Lock(f"of the {who}", url=server.url, ttl=1) for who in ("parent", "child"))
    command = [sys.executable, "-W", "ignore", "-c", FORKS, server.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None
        assert forks.stdout.readline() == "held\n"
        assert holders(server.url, parent) == 1
        forks.kill()

        until(lambda: holders(server.url, parent) == 0, "the key of the dead parent is free", timeout=5)
        assert holders(server.url, child) == 1
        forks.stdin.close()
        assert forks.stdout.read() == "kept\n"


def test_a_lock_that_is_never_released_keeps_no_process_alive(valkey: Server) -> None:
    script = "import sys; from celery_singleton_lock import Lock; Lock('stock', url=sys.argv[1]).acquire()"

    done = subprocess.run([sys.executable, "-c", script, valkey.url], timeout=20, check=False)

    assert done.returncode == 0


def test_a_killed_process_that_was_stopped_first_leaves_nothing_behind(server: Server, process: Any) -> None:
    holder = process(server.url, ttl=1)
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGSTOP)
    lock = Lock("stock", url=server.url, ttl=1)

    lease = lock.acquire(timeout=10)
    assert lease is not None
    os.kill(holder.pid, signal.SIGCONT)

    assert lease.took_over
    lock.release()
    until(lambda: holders(server.url, lock) == 0, "the stopped one has not taken it back")
