"""The keepalive: that a lease which comes later, or another store, is seen in time."""

import time
from collections.abc import Sequence

import pytest

from celery_singleton_lock.leases import keepalive as keepalive_module
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim
from tests.waiting import until


class InNeed(MemoryStore):
    """A store that holds every claim, and says that it is about to end."""

    def __init__(self, silent: bool = False, answer: Answer = Answer.DONE) -> None:
        super().__init__()
        self.silent = silent
        self.answer = answer
        self.renewed: list[str] = []

    def remaining(self, claims: Sequence[Claim], timeout: float) -> list[float | None]:
        if self.silent:
            time.sleep(timeout)
        return [0.1 for _ in claims]

    def renew(self, claims: Sequence[Claim], timeout: float) -> list[Answer]:
        if self.silent:
            time.sleep(timeout)
        self.renewed += [claim.key for claim in claims]
        return [self.answer for _ in claims]


def test_a_short_lease_after_a_long_one_is_seen_in_time() -> None:
    store = InNeed()
    late = [Renewal(store, Claim("short", "t", 1.0))]
    keepalive = Keepalive(lambda: late)
    keepalive.start(store, 3600)
    time.sleep(0.3)

    keepalive.start(store, 1.0)
    until(lambda: store.renewed, "it is renewed")
    late.clear()


def test_a_store_that_does_not_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive_module, "_BOUND", 30.0)
    silent, well = InNeed(silent=True), InNeed()
    late = [Renewal(store, Claim("k", "t", 1.0)) for store in (silent, well)]
    keepalive = Keepalive(lambda: late)

    for store in (silent, well):
        keepalive.start(store, 1.0)
    until(lambda: len(well.renewed) > 3, "the other is renewed again and again")
    late.clear()


@pytest.mark.parametrize("answer", [Answer.DONE, Answer.REPLACED, Answer.BROKEN])
def test_who_is_asked_to_make_way_is_kept_alive_until_it_hears_of_it(answer: Answer) -> None:
    store = InNeed(answer=answer)
    late = [Renewal(store, Claim("k", "t", 1.0))]
    (renewal,) = late

    Keepalive(lambda: late).start(store, 1.0)
    until(lambda: renewal.remaining > 0, "it lasts", timeout=5)
    late.clear()

    assert renewal.lost_reason is None
