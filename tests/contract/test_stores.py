"""What every store of locks owes its callers, and what the one in Redis owes Redis."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import redis

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.records import Claim, Grant
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.ageing import StandingClock
from tests.contract.asking import KEY, WOKEN, claim, granted, refused
from tests.contract.chapters.beside import Beside
from tests.contract.chapters.breaking import Breaking
from tests.contract.chapters.copies import Copies
from tests.contract.chapters.hearing import Hearing, Listening, Queue
from tests.contract.chapters.keys import Keys
from tests.contract.chapters.leasing import Leasing, Limit
from tests.contract.chapters.marks import Marks, Succession
from tests.contract.chapters.turns import ON_ITS_WAY, Turns, message, turn_of
from tests.contract.chapters.versions import Versions


class StoreContract(Leasing, Limit, Queue, Turns, Hearing, Copies, Marks, Succession, Breaking, Beside, Versions):
    """The tests that a store of locks has to pass."""


class TestMemoryStore(StoreContract):
    @pytest.fixture(autouse=True)
    def clock_starts(self) -> None:
        self.time = time.time()

    @pytest.fixture
    def store(self) -> MemoryStore:
        store = MemoryStore()
        store._server.time = self.now
        # A database goes by the clock with which it was made.
        store._server.dbs.clear()
        return store

    @pytest.fixture
    def lose_all(self, store: MemoryStore) -> Callable[[], object]:
        return partial(store.call, "FLUSHALL")

    def now(self) -> float:
        self.time += 2e-6
        return self.time

    def pass_time(self, seconds: float) -> None:
        self.time += seconds

    def nothing_is_left(self, store: Store) -> None:
        assert KEY not in Inventory(store).keys("singleton:")

    # Half a minute, for the same script as a server's.
    @pytest.mark.prove
    def test_there_are_5000_turns_at_most(self, store: MemoryStore) -> None:
        super().test_there_are_5000_turns_at_most(store)

    @pytest.mark.parametrize("mine", [claim("a", ttl=10.0), claim("a", min_hold=10.0)], ids=["lease", "cool-down"])
    def test_a_place_is_taken_to_the_moment(self, store: MemoryStore, mine: Claim) -> None:
        grant = granted(store.acquire(mine))
        if mine.min_hold:
            store.release(mine, 1)

        self.time = grant.since + 9.999
        refused(store.acquire(claim("b")))
        self.time = grant.since + 10.001

        assert granted(store.acquire(claim("b"))).took_over is (not mine.min_hold)

    def test_a_clock_that_is_set_back_makes_no_cool_down_longer_and_no_fence_lower(self, store: MemoryStore) -> None:
        mine = claim("a", limit=2, min_hold=10.0)
        fence = granted(store.acquire(mine)).fence
        self.time -= 3600
        assert granted(store.acquire(claim("b", limit=2))).fence > fence
        store.release(mine, 1)

        self.time += 10.001

        granted(store.acquire(claim("c", limit=2)))

    def test_a_waiter_may_be_so_late_after_its_call_and_not_later(self, store: MemoryStore) -> None:
        granted(store.acquire(claim("a", ttl=10.0)))
        with self.waiting(store, "late"):
            store.release(claim("a"), 1)
            called_at = self.time
            self.time = called_at + WOKEN - 0.001
            refused(store.acquire(claim("b")))
            self.time = called_at + WOKEN + 0.001

            granted(store.acquire(claim("b")))


def test_threads_that_are_the_first_to_ask_a_store_in_memory_ask_one_store() -> None:
    def ask(store: MemoryStore, begin: threading.Barrier, token: str) -> bool:
        begin.wait(60)
        return isinstance(store.acquire(claim(token)), Grant)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(100):
                asks = partial(ask, MemoryStore(), threading.Barrier(4))
                assert sum(threads.map(asks, "abcd")) == 1
    finally:
        sys.setswitchinterval(interval)


class TestStore(StoreContract, Keys, Listening):
    @pytest.fixture
    def lose_all(self, client: "redis.Redis") -> Callable[[], object]:
        return client.flushall

    @pytest.fixture(autouse=True)
    def ageing(self, client: Any) -> None:
        self.client, self.passed = client, 0.0

    def now(self) -> float:
        return clock() + self.passed

    def pass_time(self, seconds: float) -> None:
        StandingClock(self.client).advance(seconds)
        self.passed += seconds

    def nothing_is_left(self, store: Store) -> None:
        assert not self.client.exists(KEY)

    # Some seconds, for 5,000 turns.
    @pytest.mark.prove
    def test_the_oldest_turn_that_is_unheard_makes_room_in_a_full_line(self, store: Store) -> None:
        store.acquire(claim("a"))
        turn_of(store, "dead")
        self.pass_time(ON_ITS_WAY + 1)
        store.release(claim("a"), 1)
        granted(store.acquire(claim("b")))

        assert all(refused(store.acquire(message(f"m{number}", number))).rank for number in range(5001))
