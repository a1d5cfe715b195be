"""Fixtures for all tests: servers that start once and are empty for each test."""

import signal
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from celery import _state
from celery.backends import cache

from celery_singleton_lock import publish
from celery_singleton_lock.errors import StoreError, StoreRefused
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.redis.answers import Part
from celery_singleton_lock.stores.redis.store import Store
from tests.proxy import Proxy
from tests.recorder import Recorder
from tests.servers import SERVERS, FakeClock, Server, running
from tests.waiting import pulse

# Let pytest explain failed assertions of the contract. Several folders import it, so register it here.
pytest.register_assert_rewrite("tests.contract.asking", "tests.contract.chapters")


def pytest_configure() -> None:
    """Let Ctrl-C end the processes that tests start, even if a shell started pytest in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that need a server or a library beyond a bare machine to `make prove`."""
    for item in items:
        if {"redis_process", "rabbit", "wall_clock"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("prove")


def pytest_report_header() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))


@pytest.fixture(scope="session")
def valkey_process() -> Iterator[Server]:
    with running("valkey") as server:
        yield server


@pytest.fixture(scope="session")
def redis_process() -> Iterator[Server]:
    with running("redis") as server:
        yield server


@pytest.fixture
def valkey(valkey_process: Server) -> Server:
    valkey_process.flush()
    return valkey_process


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Server:
    process: Server = request.getfixturevalue(f"{request.param}_process")
    with process.client() as client:
        client.flushall()
        client.script_flush()
    return process


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    store = Store(server.url, {})
    yield store
    store.close()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with server.client() as client:
        yield client


@pytest.fixture
def proxy(valkey: Server) -> Iterator[Proxy]:
    with Proxy(valkey.port) as proxy:
        yield proxy


@pytest.fixture(params=SERVERS)
def own(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as server:
        yield server


@pytest.fixture
def recorder(valkey: Server) -> Iterator[Recorder]:
    recorder = Recorder(valkey.url.removesuffix("/0") + "/3")
    yield recorder
    recorder.close()


@pytest.fixture(autouse=True)
def no_store_is_taken_for_silent() -> None:
    """Stores in memory share one address, so a silent store of one test would count as silent in the next."""
    publish._silences.clear()


@pytest.fixture(autouse=True)
def no_result_is_there_already() -> None:
    """Result backends in memory share their data, so a test would find results of another test with its task ids."""
    cache._DUMMY_CLIENT_CACHE.clear()


@pytest.fixture(autouse=True)
def a_machine_that_stands_still_is_no_silent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test's own process ask a store once more if it stood still during a request."""
    within_its_bound = Part.persist

    def persist(part: Part, ask: Any, bound: float) -> tuple[Any, float, int]:
        began, before = clock(), pulse().stood_still()
        try:
            return within_its_bound(part, ask, bound)
        except StoreRefused:
            raise
        except StoreError:
            is_long_over = clock() - began > max(bound, 0.0) + 0.2
            # Not the heartbeat, to which a test that holds the GIL looks like a machine that stands still.
            is_the_tests = threading.current_thread() is threading.main_thread()
            if not is_long_over and not (is_the_tests and pulse().stood_still() > before):
                raise
        answer, sent_at, tries = within_its_bound(part, ask, 2.0)
        return answer, sent_at, tries + 1

    monkeypatch.setattr(Part, "persist", persist)


@pytest.fixture(autouse=True)
def nothing_is_left_to_release() -> Iterator[None]:
    """Drop releases that are still to be repeated. The next test may use the same tokens, or count commands."""
    yield
    background._waiting.clear()
    is_idle = threading.Event()
    background.submit(is_idle.set)
    is_idle.wait(1.0)
    background._waiting.clear()


@pytest.fixture(autouse=True)
def counts_stay_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send no counts while a test watches a server, unless the test asks for it."""
    monkeypatch.setattr(counters, "_will_flush", True)
    yield
    counters._events.clear()
    counters._unsent.clear()
    counters._recorded.clear()


@pytest.fixture(autouse=True)
def no_shared_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Celery from registering the tasks of one test in the apps of another."""
    its_own = {each for each in _state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(_state, "_on_app_finalizers", its_own)


@pytest.fixture
def wall_clock(tmp_path: Path) -> FakeClock:
    return FakeClock(tmp_path / "clock")
