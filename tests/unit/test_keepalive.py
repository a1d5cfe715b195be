"""The keepalive: that a lease which comes later, or another store, is seen in time."""

import time
from collections.abc import Sequence

from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim
from tests.waiting import until


class InNeed(MemoryStore):
    """A store that holds every claim, and says that it is about to end."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__()
        self.silent = silent
        self.renewed: list[str] = []

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        if self.silent:
            time.sleep(timeout)
        return [0.1 for _ in claims]

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        if self.silent:
            time.sleep(timeout)
        self.renewed += [claim.key for claim in claims]
        return [Answer.DONE for _ in claims]


def test_a_short_lease_after_a_long_one_is_seen_in_time() -> None:
    store = InNeed()
    late = [Renewal(store, Claim("short", "t", 1.0))]
    keepalive = Keepalive(lambda: late)
    keepalive.start(store, 3600)
    time.sleep(0.3)

    began = clock()
    keepalive.start(store, 1.0)
    until(lambda: store.renewed, "it is renewed", timeout=5)
    late.clear()

    assert clock() - began < 1.0


def test_a_store_that_does_not_answer_holds_up_no_other() -> None:
    silent, well = InNeed(silent=True), InNeed()
    late = [Renewal(store, Claim("k", "t", 1.0)) for store in (silent, well)]
    keepalive = Keepalive(lambda: late)

    began = clock()
    for store in (silent, well):
        keepalive.start(store, 1.0)
    until(lambda: len(well.renewed) > 3, "the other is renewed again and again", timeout=5)
    late.clear()

    assert clock() - began < 1.9
