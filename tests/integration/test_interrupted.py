"""R13: a time limit, or a signal that raises, may strike at any moment of ours, and harms nobody else."""

import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

import pytest
from celery import Celery, uuid
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock import Lock, SingletonTask, signals
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim
from tests.integration.conftest import is_renewed
from tests.servers import Server
from tests.tracing import tracer_of
from tests.waiting import until

pytestmark = [
    # The alarm is the test's own.
    pytest.mark.timeout(method="thread"),
    # An error in a finalizer vanishes there.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # Where a signal raises before the `close` of a socket, Python closes it as it is freed.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    # Celery says so where something is raised outside the body.
    pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning"),
]

TTL = 1.0
STRIKES = 60
# An answer may be on its way, and a machine has other things to do.
SLACK = 5.0


@pytest.fixture
def server(valkey: Server) -> Server:
    return valkey


@pytest.fixture
def app(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Celery:
    for each in (signals.lock_acquired, signals.lock_released):
        monkeypatch.setattr(each, "receivers", [])
    app.conf.singleton_lock_ttl = TTL
    return app


@pytest.fixture
def struck() -> Iterator[Callable[[Callable[[], object], float], bool]]:
    is_set = False

    def strike(_: int, frame: FrameType) -> None:
        nonlocal is_set
        code = Lock.__exit__.__code__
        if is_set and frame.f_code is code and frame.f_lineno == code.co_firstlineno:
            # Before its first instruction no code of ours is in time. In a task, the end of the run is.
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
        elif is_set:
            is_set = False
            raise SoftTimeLimitExceeded

    def repeat(call: Callable[[], object]) -> None:
        # Beside the `try` below, which from Python 3.13 on does not hold for the jump to the next turn.
        while is_set:
            call()

    def run(call: Callable[[], object], seconds: float) -> bool:
        nonlocal is_set
        # A task ends by what has struck, so nothing is raised here.
        try:
            is_set = True
            signal.setitimer(signal.ITIMER_REAL, seconds)
            repeat(call)
        except SoftTimeLimitExceeded:
            pass
        except Exception as error:
            if not is_made_of_a_strike_by_redis_py(error):
                raise
        return not is_set

    before = signal.signal(signal.SIGALRM, strike)
    yield run
    is_set = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def is_made_of_a_strike_by_redis_py(error: Exception) -> bool:
    """As in `Connection.__init__`, where a `finally` reads a name that the `try` had no time to bind."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_redis_py = str(frame.f_globals["__name__"]).partition(".")[0] == "redis"
    return is_redis_py and isinstance(error.__context__, SoftTimeLimitExceeded)


def blocks(app: Celery) -> Callable[[str], object]:
    def call(name: str) -> None:
        with Lock(name, app=app, ttl=TTL):
            pass

    return call


def refusals(app: Celery) -> Callable[[str], object]:
    store_of(app).acquire(Claim(Lock("taken", app=app).key, "holder", 600.0))

    def call(name: str) -> None:
        lock = Lock("taken", app=app, ttl=TTL)
        assert lock.acquire(blocking=False) is None
        assert lock.acquire(timeout=0.001) is None

    return call


def runs(app: Celery) -> Callable[[str], object]:
    """With many receivers, which hear of other tasks, so that much is struck while a signal is sent."""
    for number in range(300):
        for each in (signals.lock_acquired, signals.lock_released):
            each.connect(lambda **_: None, sender=app, weak=False, dispatch_uid=number)

    @app.task(base=SingletonTask, name="import_catalogue")
    def import_catalogue(name: str) -> None:
        pass

    trace = tracer_of(import_catalogue)

    def call(name: str) -> None:
        sent = uuid()
        trace(sent, (name,), {}, {"id": sent, "args": (name,), "is_eager": False})

    return call


@pytest.mark.parametrize("what", [blocks, refusals, runs])
def test_a_signal_at_any_moment_harms_nobody_else(
    what: Callable[[Celery], Callable[[str], object]], app: Celery, struck: Any, valkey: Server
) -> None:
    call, fresh = what(app), Lock("fresh", app=app)
    with Lock("beside", app=app, ttl=6) as beside, valkey.client() as client:
        for number in range(STRIKES):
            # So that what a strike has left is in the way of no other.
            assert struck(lambda name=f"stock {number}": call(name), random.uniform(1e-5, 3e-3))
            assert_that_answers_fit_questions(fresh)

        def are_free() -> bool:
            held = {key for key in client.keys("*{*}") if store_of(app).holders(key)}
            return held <= {beside.key, Lock("taken", app=app).key}

        until(are_free, "the keys are free", timeout=TTL + SLACK)
        is_renewed(beside)
        assert [holder.fence for holder in store_of(app).holders(beside.key)] == [beside.fence]


def test_a_block_that_is_struck_at_any_call_leaves_no_lease_to_a_lock_that_lasts(app: Celery) -> None:
    """A module keeps its `Lock`; and nobody leaves a block that was struck as it began."""
    called: list[CodeType] = []

    def enter(lock: Lock, at_call: Callable[[FrameType], None]) -> None:
        def trace(frame: FrameType, *_: object) -> None:
            at_call(frame)

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with lock:
                pass
        finally:
            sys.settrace(before)

    def striking(code: CodeType, earlier: int) -> Callable[[FrameType], None]:
        def strike(frame: FrameType) -> None:
            nonlocal earlier
            earlier -= frame.f_code is code
            if earlier < 0:
                raise SoftTimeLimitExceeded

        return strike

    enter(Lock("stock", app=app), lambda frame: called.append(frame.f_code))
    locks = []
    for number, code in enumerate(called):
        # Before the first instruction of `__exit__` no code of ours is in time.
        if code is not Lock.__exit__.__code__:
            locks.append(Lock(f"stock {number}", app=app, ttl=TTL))
            with suppress(SoftTimeLimitExceeded):
                enter(locks[-1], striking(code, called[:number].count(code)))
    until(lambda: not any(lock.state().holders for lock in locks), "the keys are free", timeout=TTL + SLACK)


def assert_that_answers_fit_questions(fresh: Lock) -> None:
    """Of the connections that the process has kept; each asks something else than what was broken off."""
    for _ in range(2):
        with fresh as lease:
            assert lease.fence > 0
            assert fresh.acquire(blocking=False) is None
            assert lease.held


GREEN = """
{patch}
import random, sys, time
from celery_singleton_lock import Lock
from celery_singleton_lock.stores import store_from_url

class Struck(Exception):
    pass

def body(name):
    try:
        while True:
            with Lock(name, url=url, ttl=1):
                pass
    except Struck:
        pass

url, store = sys.argv[1], store_from_url(sys.argv[1])
fresh, names = Lock("fresh", url=url), ["stock %d" % number for number in range({strikes})]
with Lock("beside", url=url, ttl=6) as beside:
    for name in names:
        green = spawn(body, name)
        time.sleep(random.uniform(0, 3e-3))
        green.kill(Struck)
        with fresh as lease:
            assert fresh.acquire(blocking=False) is None and lease.held
    give_up_at = time.monotonic() + {patience}
    while held := [name for name in names if store.holders(Lock(name, url=url).key)]:
        assert time.monotonic() < give_up_at, held
        time.sleep(0.05)
    seen = [beside.remaining()]
    while len(seen) < 2 or seen[-1] <= seen[-2]:
        assert time.monotonic() < give_up_at + 10, seen[-1]
        time.sleep(0.01)
        seen.append(beside.remaining())
    assert [holder.fence for holder in store.holders(beside.key)] == [beside.fence]
print("well")
"""


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param("from gevent import monkey, spawn; monkey.patch_all()", id="gevent"),
        pytest.param(
            "import eventlet; eventlet.monkey_patch(); spawn = eventlet.spawn", id="eventlet", marks=pytest.mark.prove
        ),
    ],
)
def test_an_error_that_is_thrown_into_a_greenlet_at_any_moment_harms_nobody_else(valkey: Server, patch: str) -> None:
    script = GREEN.format(patch=patch, strikes=STRIKES, patience=TTL + SLACK)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, valkey.url], capture_output=True, text=True, timeout=180
    )

    assert done.stdout == "well\n", done.stderr
