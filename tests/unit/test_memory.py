"""The store in memory as tests use it: its clock is nobody's wall clock, goes on by hand, and begins anew."""

import os
import subprocess
import sys
from typing import Any

import pytest

from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Claim, Conflict, Grant, Slot
from tests.servers import FakeClock

CLIENT_WHOSE_CLOCK_IS_SET = """
import sys, time
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
    store.mark_done("marker", 0, "stored", 60.0)
    began = store.now()
    store.advance(7200.0)

    store.reset()

    assert isinstance(store.acquire(Claim("k", "b", ttl=30.0)), Grant)
    assert store.slots("slots") == {}
    assert abs(store.now() - began) < 60_000_000
