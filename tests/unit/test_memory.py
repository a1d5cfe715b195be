"""The store in memory as tests use it: its clock is nobody's wall clock, goes on by hand, and begins anew."""

import os
import subprocess
import sys
from typing import Any

import pytest

from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.records import Claim, Conflict, Grant, Slot
from tests.servers import FakeClock

CLIENT_WHOSE_CLOCK_IS_SET = """
import sys, time
from celery_singleton_lock import Lock
with Lock("stock", url="memory://", ttl=60) as lease:
    print(time.time(), flush=True)
    sys.stdin.readline()
    others = Lock("stock", url="memory://").acquire(blocking=False)
    print(time.time(), others is None, flush=True)
"""


@pytest.mark.parametrize("step", ["+3600", "-3600"])
def test_a_wall_clock_that_is_set_moves_no_lock(wall_clock: FakeClock, step: str) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT_WHOSE_CLOCK_IS_SET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **wall_clock.env},
    )
    assert client.stdout is not None
    before = float(client.stdout.readline())
    wall_clock.step(step)
    output, _ = client.communicate("\n", timeout=20)

    after, is_held = output.split()
    assert abs(float(after) - before - int(step)) < 60
    assert is_held == "True"


@pytest.fixture
def store() -> Any:
    store = store_from_url("memory://by-hand")
    assert isinstance(store, MemoryStore)
    yield store
    store.reset()


def test_time_passes_by_hand(store: MemoryStore) -> None:
    store.acquire(Claim("k", "a", ttl=30.0))

    store.advance(29.0)
    assert isinstance(store.acquire(Claim("k", "b", ttl=30.0)), Conflict)
    store.advance(2.0)
    granted = store.acquire(Claim("k", "b", ttl=30.0))

    assert isinstance(granted, Grant)
    assert granted.took_over


def test_a_store_that_is_reset_is_as_new(store: MemoryStore) -> None:
    cooling = Claim("k", "a", ttl=30.0, min_hold=3600.0)
    store.acquire(cooling)
    store.release(cooling, 1)
    store.claim_slot("slots", Slot("entry", due=1, fence=1))
    store.mark_done("k", "done:a:0", 0, "stored", 60.0)
    began = store.now()
    store.advance(7200.0)

    store.reset()

    assert isinstance(store.acquire(Claim("k", "b", ttl=30.0)), Grant)
    assert store.slots("slots") == {}
    assert abs(store.now() - began) < 60_000_000


def test_who_waits_looks_again_when_time_has_passed_and_keeps_its_turn(store: MemoryStore) -> None:
    cooling = Claim("k", "a", ttl=30.0, min_hold=3600.0)
    store.acquire(cooling)
    store.release(cooling, 1)
    waiting = [Claim("k", token, ttl=30.0) for token in "bc"]
    with store.waiter(waiting[0]) as first, store.waiter(waiting[1]) as second:
        assert isinstance(first.ask(), float)
        assert isinstance(second.ask(), float)
        began = clock()

        store.advance(3601.0)
        first.sleep(20)

        assert clock() - began < 10
        assert isinstance(second.ask(), float)
        assert isinstance(first.ask(), Grant)
        assert isinstance(second.ask(), float)


def test_without_its_extra_one_line_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['{}'] = None\nfrom celery_singleton_lock import Lock\nLock('stock', url='memory://')"
    )
    for package in ("fakeredis", "lupa"):
        ran = subprocess.run(
            [sys.executable, "-c", program.format(package)], capture_output=True, text=True, timeout=30
        )

        *_, said = ran.stderr.splitlines()
        assert "ConfigurationError: memory:// needs more packages" in said
        assert said.endswith('pip install "celery-singleton-lock[testing]"')
