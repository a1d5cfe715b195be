"""How the contract suite asks a store, and what every chapter of it needs."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from celery_singleton_lock.leases.line import bell, pause_after, pause_before
from celery_singleton_lock.stores.records import (
    Claim,
    Conflict,
    Done,
    Ending,
    Grant,
    Holder,
    Marked,
    Position,
    Release,
    Succession,
)
from celery_singleton_lock.stores.records import marker_of as marker_of_message
from celery_singleton_lock.stores.redis.store import Store

KEY = "singleton:v3:{shop.tasks.sync:00}"
OTHER = "singleton:v3:{shop.tasks.sync:11}"
SLOTS = "singleton:v3:{celery.beat:00}:slots"
SHORT = 10.0
"""A ttl that a test lets pass."""

WOKEN = 3.0
"""Seconds in which one that was called has to come."""

PATIENCE = 30.0
"""Seconds for which a place is kept for a successor that does not come."""

MEMORY = 3600.0
"""Seconds for which a successor supersedes older calls."""

ENDED = Ending("ended", 60.0, is_due=False)

TAKEN, GONE = Release("none", "taken"), Release("none", "expired")

CLOCKS_DIFFER_BY = 0.02
"""Seconds that the store's clock may gain on the test's."""


def claim(
    token: str, *, key: str = KEY, ttl: float = 30.0, limit: int = 1, min_hold: float = 0.0, **facts: Any
) -> Claim:
    return Claim(key, token, ttl, limit, min_hold=min_hold, **facts)


def call(name: str, published: float = 0.0, **more: Any) -> Claim:
    """The claim of a task: its token is its task id; published so many thousand seconds after the epoch."""
    return Claim(KEY, name, 30.0, task_id=name, published=round(published * 1_000_000_000), **more)


def again(wanted: Claim, **more: Any) -> Claim:
    return dataclasses.replace(wanted, newest="next", **more)


def delivery(token: str, task_id: str = "a", attempt: int = 0, **more: Any) -> Claim:
    return Claim(KEY, token, 30.0, task_id=task_id, attempt=attempt, may_be_copy=True, **more)


def marker_of(task_id: str) -> str:
    return marker_of_message(task_id, 0)


def succeeding(wanted: Claim, rule: Succession, task_name: str = "") -> Claim:
    """The same, of a call that becomes the successor if it is refused."""
    name = task_name or wanted.task_name
    return dataclasses.replace(wanted, task_name=name, succeeds=rule, supersedes_for=MEMORY)


class Waiter:
    """One that waits in this process, as a `Lock` does, and asks when the test says so."""

    def __init__(self, store: Store, wanted: Claim) -> None:
        self.claim = dataclasses.replace(wanted, turn_for=3 * wanted.ttl, waits_here=True)
        self._store = store
        self._bell = bell(store, self.claim.channel)

    def __enter__(self) -> Self:
        self.sleep = self._bell.__enter__()
        self.sleep(pause_before(self.claim, float("inf")))
        return self

    def __exit__(self, *_: object) -> None:
        self._bell.__exit__(None, None, None)

    def ask(self) -> Grant | Conflict | Done | float:
        """The answer, or how many seconds to sleep at most."""
        answer = self._store.acquire(self.claim)
        return pause_after(answer, self.claim, self._store, float("inf")) or answer


def succeed(store: Store, wanted: Claim, rule: Succession, task_name: str = "") -> str | None:
    return refused(store.acquire(succeeding(wanted, rule, task_name))).successor


def successor_of(store: Store) -> str | None:
    (survey,) = store.survey([KEY])
    return next((mark.task_id for mark in survey.marks if mark.state == "next"), None)


def mark_queued(
    store: Store, task_id: str, *, seconds: float = 60.0, limit: int = 0, cooldown: float = 0.0, **more: Any
) -> Marked | Holder:
    return store.mark_queued(KEY, task_id, seconds, limit=limit, cooldown=cooldown, **more)


def mark_newest(store: Store, wanted: Claim, **more: Any) -> Marked | Holder:
    return mark_queued(store, wanted.task_id, newest=True, published=wanted.published, **more)


def begin(store: Store, wanted: Claim) -> Conflict | None:
    """Begin its body without a lease, unless a newer call is queued or has begun."""
    return store.unmark(KEY, wanted.task_id, ends_cooldown=False, heeds=True, claim=wanted)


def found(answer: Marked | Holder) -> Holder:
    assert isinstance(answer, Holder), answer
    return answer


def granted(answer: Grant | Conflict | Done | float) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def queued(answer: Grant | Conflict | Done | float) -> float:
    assert isinstance(answer, float), answer
    return answer


def refused(answer: Grant | Conflict | Done | Position | float) -> Conflict:
    assert isinstance(answer, Conflict), answer
    return answer


def tokens(holders: Sequence[Holder]) -> list[str]:
    return sorted(holder.token for holder in holders)


class Contract:
    def now(self) -> float:
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        raise NotImplementedError

    def nothing_is_left(self, store: Store) -> None:
        raise NotImplementedError

    def let_expire(self, store: Store, key: str = KEY) -> None:
        for _ in range(100):
            self.pass_time(0.05 * SHORT)
            if not store.holders(key):
                return
        raise AssertionError(f"{key} does not expire: {store.holders(key)}")

    @contextmanager
    def waiting(self, store: Store, *names: str, limit: int = 1) -> Iterator[dict[str, Waiter]]:
        with ExitStack() as stack:
            waiters = {}
            for name in names:
                waiters[name] = stack.enter_context(Waiter(store, claim(name, limit=limit)))
                queued(waiters[name].ask())
            yield waiters
