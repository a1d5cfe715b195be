"""Every order in which three clients can acquire, renew and release one lock, lose a reply, and let it expire."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import pytest

from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.records import RELEASED, Claim, Conflict, Grant, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.ageing import StandingClock
from tests.servers import Server

CLIENTS = 3
LENGTH = 4
TTL = 100.0
SAMPLE = 200
VERBS = ("acquire", "acquire, reply lost", "renew", "release")

Action = tuple[str, int]
ACTIONS: list[Action] = [(verb, client) for verb in VERBS for client in range(CLIENTS)] + [("expire", 0)]


def schedules() -> Iterator[tuple[Action, ...]]:
    """All of them, but for those that only give the clients other names."""
    for schedule in product(ACTIONS, repeat=LENGTH):
        order = [client for verb, client in schedule if verb != "expire"]
        if all(client <= len(set(order[:n])) for n, client in enumerate(order)):
            yield schedule


@dataclass
class Expected:
    """What a lock of one place has to do, in the fewest words."""

    token: str | None = None
    alive: bool = False
    fence: int = 0

    def grow_older(self) -> None:
        """The first time the deadline passes, the second time the expiry of the key."""
        self.token = self.token if self.alive else None
        self.alive = False

    def may_acquire(self, token: str) -> bool:
        return not self.alive or self.token == token


@dataclass
class Play:
    """One schedule, acted on a store."""

    store: Store
    let_expire: Callable[[], None]
    key: str
    expected: Expected = field(default_factory=Expected)

    def act(self, schedule: tuple[Action, ...]) -> None:
        for verb, client in schedule:
            if verb == "expire":
                self.let_expire()
                self.expected.grow_older()
            else:
                claim = Claim(self.key, f"token-{client}", TTL)
                getattr(self, verb.partition(",")[0])(claim)
            self.compare()

    def acquire(self, claim: Claim) -> None:
        # Whether the reply is heard makes no difference to the store, and
        # whoever has not heard it has to repeat the request with the same token.
        answer, expected = self.store.acquire(claim), self.expected
        if not expected.may_acquire(claim.token):
            assert isinstance(answer, Conflict)
            assert [holder.token for holder in answer.holders] == [expected.token]
            return
        assert isinstance(answer, Grant)
        if expected.token == claim.token:
            assert answer.fence == expected.fence
        else:
            assert answer.fence > expected.fence
            assert answer.took_over is (expected.token is not None)
        self.expected = Expected(claim.token, True, answer.fence)

    def renew(self, claim: Claim) -> None:
        (answer,) = self.store.renew([claim], 1.0)
        assert (answer is Renewal.RENEWED) is (self.expected.token == claim.token)
        if answer is Renewal.RENEWED:
            self.expected.alive = True

    def release(self, claim: Claim) -> None:
        answer = self.store.release(claim, None)
        assert (answer == RELEASED) is (self.expected.token == claim.token)
        if answer == RELEASED:
            self.expected = Expected(fence=self.expected.fence)

    def compare(self) -> None:
        holders = [holder.token for holder in self.store.holders(self.key)]
        assert holders == ([self.expected.token] if self.expected.alive else [])


# Three minutes.
@pytest.mark.nightly
def test_no_order_of_events_lets_two_hold_the_lock_or_a_stranger_free_it() -> None:
    store = MemoryStore()

    def let_expire() -> None:
        # Past the deadline, and not past the expiry of the key.
        store.advance(TTL * 1.1)

    count = 0
    for count, schedule in enumerate(schedules(), 1):  # noqa: B007 (asserted on below)
        store.clear()
        Play(store, let_expire, "{key}").act(schedule)

    assert count > 5_000


@pytest.fixture
def play(server: Server) -> Iterator[Callable[[tuple[Action, ...]], None]]:
    store, admin = Store(server.url, {}), server.client()
    clock = StandingClock(admin)

    def act(schedule: tuple[Action, ...]) -> None:
        admin.flushdb()
        Play(store, lambda: clock.advance(TTL * 1.1), "{key}").act(schedule)

    yield act
    store.close()
    admin.close()


def test_the_scripts_act_the_same_schedules_on_a_real_server(play: Any) -> None:
    everything = random.Random(7).sample(list(islice(schedules(), None)), SAMPLE)

    for schedule in everything:
        play(schedule)
