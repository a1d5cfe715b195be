"""Three clients acquire, renew and release one lock, lose a reply, and let it expire, in orders that a seed draws."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock.stores.records import RELEASED, Claim, Conflict, Grant, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.ageing import StandingClock

TTL = 100.0
Action = tuple[str, int]
VERBS = ("acquire", "acquire, reply lost", "renew", "release")
ACTIONS: list[Action] = [(verb, client) for verb in VERBS for client in range(3)] + 2 * [("expire", 0)]


@dataclass
class Expected:
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
    store: Store
    let_expire: Callable[[], None]
    key: str
    expected: Expected = field(default_factory=Expected)

    def act(self, schedule: list[Action]) -> None:
        for verb, client in schedule:
            if verb == "expire":
                self.let_expire()
                self.expected.grow_older()
            else:
                claim = Claim(self.key, f"token-{client}", TTL)
                getattr(self, verb.partition(",")[0])(claim)
            self.compare()

    def acquire(self, claim: Claim) -> None:
        # A lost reply makes no difference to the store: the client repeats the request with the same token.
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


def test_no_order_of_events_lets_two_hold_the_lock_or_a_stranger_free_it(store: Store, client: Any) -> None:
    rng, clock = random.Random(7), StandingClock(client)
    for _ in range(1000):
        store.call("FLUSHDB")
        # Past the deadline, and not past the expiry of the key.
        Play(store, lambda: clock.advance(TTL * 1.1), "{key}").act(rng.choices(ACTIONS, k=5))
