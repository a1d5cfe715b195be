"""What a process counts: sums, batches, and what is left if something fails."""

import os
import threading
from collections import Counter
from collections.abc import Mapping
from weakref import ref

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.leases import tally as tally_module
from celery_singleton_lock.leases.heartbeat import Heartbeat
from celery_singleton_lock.leases.pulse import Pulse
from celery_singleton_lock.leases.renewal import Renewal
from celery_singleton_lock.leases.tally import Tally
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.counts import OTHERS
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Claim
from tests.forks import in_a_fork
from tests.waiting import until

KEY = "singleton:v2:{shop.sync:00}"
COUNTS = "singleton:v2:stats"
PROMPTLY = 30


class Fickle(MemoryStore):
    """A store that answers when it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes = 0
        self.patience = 0.0
        self.before: BaseException | None = None
        self.after: BaseException | None = None

    def count(self, key: str, process: str, number: int, sums: Mapping[str, int], timeout: float) -> None:
        self.flushes += 1
        self.patience = timeout
        if self.before is not None:
            raise self.before
        super().count(key, process, number, sums, timeout)
        if self.after is not None:
            raise self.after


@pytest.fixture
def store() -> Fickle:
    return Fickle()


@pytest.fixture
def tally() -> Tally:
    def begin(store: Store) -> None:
        tally.begin(store)

    tally = Tally(begin)
    return tally


def silence() -> StoreError:
    return StoreError("store://here", "no reply")


def test_sums_are_handed_over(tally: Tally, store: Fickle) -> None:
    for waited in (0.0, 0.5, 0.5):
        tally.add(store, KEY, "acquired", "shop.sync", value=waited)
    tally.add(store, KEY, "conflicts", "shop.sync", "skipped")
    tally.add(store, KEY, "held", "shop.sync", value=2.5)
    tally.add(store, KEY, "held", "shop.sync", value=99999.0)
    tally.add(store, KEY, "late", "")

    tally.flush(store, 1.0)

    assert store.counted(COUNTS) == {
        "acquired::shop.sync": 3,
        "waited:0.01:shop.sync": 1,
        "waited:1:shop.sync": 2,
        "waited:sum:shop.sync": 1_000_000,
        "conflicts:skipped:shop.sync": 1,
        "held:10:shop.sync": 1,
        "held:+Inf:shop.sync": 1,
        "held:sum:shop.sync": 100_001_500_000,
        "late::": 1,
    }


def test_a_value_on_a_bound_is_in_the_bucket_of_that_bound(tally: Tally, store: Fickle) -> None:
    tally.add(store, KEY, "held", "shop.sync", value=10.0)
    tally.flush(store, 1.0)

    assert store.counted(COUNTS) == {"held:10:shop.sync": 1, "held:sum:shop.sync": 10_000_000}


def test_nothing_new_is_nothing_to_hand_over(tally: Tally, store: Fickle) -> None:
    tally.add(store, KEY, "late", "shop.sync")
    tally.flush(store, 1.0)
    tally.flush(store, 1.0)

    assert store.flushes == 1
    assert tally.due_at(store) == float("inf")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_was_not_answered_is_told_again_and_counted_once(tally: Tally, store: Fickle, moment: str) -> None:
    tally.add(store, KEY, "late", "shop.sync")
    setattr(store, moment, silence())
    for _ in range(3):
        with pytest.raises(StoreError):
            tally.flush(store, 1.0)
    tally.add(store, KEY, "late", "shop.sync")
    setattr(store, moment, None)

    tally.flush(store, 1.0)

    assert store.counted(COUNTS) == {"late::shop.sync": 2}


def test_what_piles_up_while_the_store_is_away_is_added_up(tally: Tally, store: Fickle) -> None:
    store.before = silence()
    for _ in range(50):
        tally.add(store, KEY, "late", "shop.sync")
        with pytest.raises(StoreError):
            tally.flush(store, 1.0)
    store.before, store.flushes = None, 0

    tally.flush(store, 1.0)

    assert store.counted(COUNTS) == {"late::shop.sync": 50}
    assert store.flushes == 2


def test_one_call_of_the_store_is_bounded(tally: Tally, store: Fickle) -> None:
    for number in range(250):
        tally.add(store, KEY, "late", f"shop.{number}")
    tally.flush(store, 1.0)

    assert store.flushes == 3
    assert len(store.counted(COUNTS)) == 250


def test_what_comes_behind_a_batch_that_fails_is_kept(tally: Tally, store: Fickle) -> None:
    other = Fickle()
    for number in range(250):
        tally.add(store, KEY, "late", f"shop.{number}")
    tally.add(other, KEY, "late", "shop.sync")
    for each in (store, other):
        each.before = silence()
        with pytest.raises(StoreError):
            tally.flush(each, 1.0)
    store.before = other.before = None

    for each in (store, other):
        tally.flush(each, 1.0)

    assert len(store.counted(COUNTS)) == 250
    assert other.counted(COUNTS) == {"late::shop.sync": 1}


def test_names_without_end_become_one(tally: Tally, store: Fickle) -> None:
    for number in range(600):
        tally.add(store, KEY, "late", f"shop.{number}")
    tally.flush(store, 1.0)

    counted = store.counted(COUNTS)
    assert len(counted) == 501
    assert counted[f"late::{OTHERS}"] == 100


def test_a_name_that_cannot_be_sent_keeps_no_other_back(tally: Tally, store: Fickle) -> None:
    tally.add(store, KEY, "late", "shop.\ud800")
    tally.flush(store, 1.0)

    assert [*store.counted(COUNTS)] == ["late::shop.?"]


def test_stores_and_prefixes_are_counted_apart(tally: Tally, store: Fickle) -> None:
    other = Fickle()
    tally.add(store, KEY, "late", "a")
    tally.add(store, "other:v2:{x:0}", "late", "b")
    tally.add(other, KEY, "late", "c")

    tally.flush(store, 1.0)

    assert (store.counted(COUNTS), store.counted("other:v2:stats")) == ({"late::a": 1}, {"late::b": 1})
    assert other.counted(COUNTS) == {}
    tally.flush_all()
    assert other.counted(COUNTS) == {"late::c": 1}


def test_an_end_that_meets_no_store_is_an_end(tally: Tally, store: Fickle) -> None:
    other = Fickle()
    store.before = silence()
    for each in (store, other):
        tally.add(each, KEY, "late", "shop.sync")

    tally.flush_all()

    assert other.counted(COUNTS) == {"late::shop.sync": 1}


def test_threads_lose_nothing(tally: Tally, store: Fickle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "_MOST_UNSORTED", 50)
    rounds, number = 2000, 4

    def go() -> None:
        for _ in range(rounds):
            tally.add(store, KEY, "acquired", "shop.sync", value=0.0)

    threads = [threading.Thread(target=go) for _ in range(number)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tally.flush(store, 1.0)
    tally.flush(store, 1.0)

    assert store.counted(COUNTS)["acquired::shop.sync"] == rounds * number


def test_what_is_not_handed_over_for_long_does_not_pile_up(
    tally: Tally, store: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_module, "_MOST_UNSORTED", 50)
    for _ in range(1000):
        tally.add(store, KEY, "late", "shop.sync")

    assert len(tally._events) <= 51


# With the thread of a heartbeat.


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    monkeypatch.setattr(tally_module, "EVERY", 0.2)
    return Heartbeat()


def test_the_heartbeat_hands_over_though_nothing_is_held(heart: Heartbeat, store: Fickle) -> None:
    for _ in range(3):
        heart.tally.add(store, KEY, "conflicts", "shop.sync", "skipped")

    until(lambda: store.counted(COUNTS) == {"conflicts:skipped:shop.sync": 3}, "it is handed over", timeout=PROMPTLY)
    heart.tally.add(store, KEY, "conflicts", "shop.sync", "skipped")
    until(lambda: store.counted(COUNTS) == {"conflicts:skipped:shop.sync": 4}, "it is again", timeout=PROMPTLY)
    assert store.flushes == 2


def test_a_thread_sleeps_until_it_hands_over(heart: Heartbeat, store: Fickle, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[Pulse] = []
    usual = Pulse._beat

    def beat(pulse: Pulse) -> None:
        # Leases of an earlier test may have a thread yet.
        if pulse._tally is heart.tally:
            beats.append(pulse)
        else:
            usual(pulse)

    monkeypatch.setattr("celery_singleton_lock.leases.pulse._LINGERS", 0.0)
    monkeypatch.setattr(Pulse, "_beat", beat)
    heart.tally.add(store, KEY, "late", "shop.sync")

    until(lambda: store.flushes == 1, "it is handed over", timeout=PROMPTLY)
    until(lambda: not heart._pulses, "the thread has ended", timeout=PROMPTLY)

    assert len(beats) <= 3


def test_many_counts_are_handed_over_seldom(monkeypatch: pytest.MonkeyPatch, store: Fickle) -> None:
    monkeypatch.setattr(tally_module, "EVERY", 3600.0)
    heart = Heartbeat()
    for _ in range(1000):
        heart.tally.add(store, KEY, "late", "shop.sync")

    assert store.flushes == 0
    heart.tally.flush_all()
    assert store.counted(COUNTS) == {"late::shop.sync": 1000}


def test_what_a_store_that_was_away_has_missed_is_told_once_it_is_back(
    heart: Heartbeat, store: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_singleton_lock.leases.pulse._LINGERS", 0.1)
    monkeypatch.setattr("celery_singleton_lock.leases.pulse._AGAIN", 0.2)
    store.before = silence()
    heart.tally.add(store, KEY, "late", "shop.sync")

    until(lambda: store.flushes >= 2, "it was tried again", timeout=PROMPTLY)
    store.before = None
    until(lambda: store.counted(COUNTS) == {"late::shop.sync": 1}, "it is told", timeout=PROMPTLY)
    until(lambda: not heart._pulses, "the thread has ended", timeout=PROMPTLY)


def pulse_with(store: Fickle, tally: Tally, *renewals: Renewal) -> Pulse:
    pulse = Pulse(store, threading.RLock(), lambda _: None, tally)
    pulse._watched.update(dict.fromkeys(map(ref, renewals)))
    tally.add(store, KEY, "late", "shop.sync")
    tally.put_off(store, clock())
    return pulse


def renewal_due_in(store: Fickle, seconds: float) -> Renewal:
    renewal = Renewal(store, Claim(KEY, "token", 30.0))
    renewal.renewed(clock())
    renewal.next_renewal = clock() + seconds
    return renewal


def test_no_renewal_waits_for_counts(tally: Tally, store: Fickle) -> None:
    late, soon = renewal_due_in(store, 20.0), renewal_due_in(store, 0.4)
    pulse = pulse_with(store, tally, late, soon)

    pulse._hand_over_counts()

    assert store.flushes == 1
    assert 0 < store.patience <= 0.4


def test_a_renewal_that_is_about_to_be_due_goes_first(tally: Tally, store: Fickle) -> None:
    renewal = renewal_due_in(store, 0.01)
    pulse = pulse_with(store, tally, renewal)

    pulse._hand_over_counts()

    assert store.flushes == 0
    assert tally.due_at(store) == renewal.next_renewal


def test_counts_wait_while_a_lease_is_unsure(tally: Tally, store: Fickle) -> None:
    renewal = renewal_due_in(store, 20.0)
    renewal.unsure()
    pulse = pulse_with(store, tally, renewal)

    pulse._hand_over_counts()

    assert store.flushes == 0
    assert clock() < tally.due_at(store) <= clock() + 1.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_counts_nothing_of_its_parent(store: Fickle) -> None:
    heart = Heartbeat()
    heart.tally.add(store, KEY, "late", "shop.sync")

    def child() -> Counter[str]:
        heart.tally.flush_all()
        return Counter(store.counted(COUNTS))

    assert in_a_fork(child) == "Counter()"
