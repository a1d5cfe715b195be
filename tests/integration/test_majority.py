"""Why a list of stores is refused: a majority of independent masters, made as well as can be, may have two holders."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Claim, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.servers import FakeClock, Server, running
from tests.waiting import until

KEY = "singleton:v3:{majority:00}"
TTL = 60.0
MASTERS = 3
SHARE_FOR_DRIFT = 0.01
APART = 30.0
"""Seconds by which the clock of a master may differ from ours before it does not vote; generous to a busy machine."""


@dataclass
class Held:
    """What more than half of the masters have granted."""

    token: str
    fence: int
    deadline: float

    @property
    def is_held(self) -> bool:
        return clock() < self.deadline


class Majority:
    """A lock over independent masters, as Redlock has it, by our own scripts."""

    def __init__(self, *reached: Server) -> None:
        self._stores = [Store(server.url, {}) for server in reached]

    def acquire(self, token: str, limit: int = 1) -> Held | None:
        claim, began = Claim(KEY, token, TTL, limit=limit), clock()
        answers = [store.acquire(claim) for store in self._stores if _has_our_time(store)]
        fences = [answer.fence for answer in answers if isinstance(answer, Grant)]
        held = Held(token, max(fences, default=0), began + TTL * (1 - SHARE_FOR_DRIFT))
        if len(fences) > MASTERS / 2 and held.is_held:
            return held
        self.release(token)
        return None

    def release(self, token: str) -> None:
        for store in self._stores:
            store.release(Claim(KEY, token, TTL), None)


def _has_our_time(store: Store) -> bool:
    return abs(store.now() / 1_000_000 - time.time()) < APART


@pytest.fixture
def masters(wall_clock: FakeClock) -> Iterator[tuple[Server, Server, Server]]:
    """Of which the second has a clock that can be set."""
    with ExitStack() as cleanup:
        one, three = (cleanup.enter_context(running("valkey")) for _ in range(2))
        two = cleanup.enter_context(running("valkey", env=wall_clock.env))
        yield one, two, three


def test_a_master_that_restarts_without_its_data_makes_two_holders(masters: tuple[Server, Server, Server]) -> None:
    one, two, three = masters
    first = Majority(one, two).acquire("a")
    two.stop()
    two.start()

    second = Majority(two, three).acquire("b")

    assert first is not None
    assert second is not None
    assert first.is_held
    assert second.is_held


def test_a_clock_that_jumps_and_comes_back_makes_two_holders_and_leaves_no_trace(
    masters: tuple[Server, Server, Server], wall_clock: FakeClock
) -> None:
    """To let no master vote that has restarted within a ttl mends the test above, and not this one."""
    one, two, three = masters
    first = Majority(one, two).acquire("a")
    with two.client() as client:
        before = client.info("server")["run_id"]
        wall_clock.step(f"+{round(4 * TTL)}")
        until(lambda: not client.exists(KEY), "it takes the lease for expired")
        wall_clock.step("+0")
        # All that a caller could look at is as it should be.
        until(lambda: _has_our_time(Store(two.url, {})), "it has the right time again")
        assert client.info("server")["run_id"] == before

    second = Majority(two, three).acquire("b")

    assert first is not None
    assert second is not None
    assert first.is_held
    assert second.is_held
