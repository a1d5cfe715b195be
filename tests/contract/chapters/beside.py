"""What is kept beside the locks: numbers, the last events, and the slots of a beat."""

import dataclasses

from celery_singleton_lock.stores.records import Slot
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import SLOTS, Contract

COUNTS = "singleton:v3:stats"

TIMEOUT = 30.0

HISTORY = "singleton:v3:history"


class Beside(Contract):
    def test_numbers_are_added_up(self, store: Store) -> None:
        assert Inventory(store).counted(COUNTS) == {}

        store.count(COUNTS, {"acquired::shop.sync": 2, "held:sum:shop.sync": 1_500_000}, TIMEOUT)
        store.count(COUNTS, {"acquired::shop.sync": 3}, TIMEOUT)
        store.count(COUNTS, {"acquired::shop:sync": 4}, TIMEOUT)

        added = {"acquired::shop.sync": 5, "held:sum:shop.sync": 1_500_000, "acquired::shop:sync": 4}
        assert Inventory(store).counted(COUNTS) == added

    def test_the_last_so_many_are_kept_however_they_come(self, store: Store) -> None:
        store.history = 5
        try:
            for number in range(0, 6, 2):
                store.record(HISTORY, [str(number), str(number + 1)], TIMEOUT)
            kept = store.fields(HISTORY)
            store.record(HISTORY, [f"new {number}" for number in range(8)], TIMEOUT)
            after = store.fields(HISTORY)
        finally:
            del store.history

        assert sorted(value for name, value in kept.items() if name != "last") == ["1", "2", "3", "4", "5"]
        assert {value for name, value in after.items() if name != "last"} == {f"new {each}" for each in range(3, 8)}

    def test_it_has_an_expiry_and_is_no_lock(self, store: Store) -> None:
        store.record(HISTORY, ["an event"], TIMEOUT)

        assert 29 * 24 * 3600 * 1000 < store.call("PTTL", HISTORY) <= 30 * 24 * 3600 * 1000
        assert list(Inventory(store).keys("singleton:v3:{")) == []

    def test_a_slot_is_claimed_until_it_was_sent(self, store: Store) -> None:
        slot = Slot("entry", due=1_000_000, fence=5)
        assert store.change_slot(SLOTS, "claim", slot)
        assert store.change_slot(SLOTS, "claim", dataclasses.replace(slot, fence=6)), "the heir sends what was not sent"
        assert store.change_slot(SLOTS, "note", dataclasses.replace(slot, fence=6, sent=1_000_100))

        assert not store.change_slot(SLOTS, "claim", dataclasses.replace(slot, fence=7))
        assert store.change_slot(SLOTS, "claim", Slot("entry", due=3_000_000, fence=7))
        assert store.change_slot(SLOTS, "claim", dataclasses.replace(slot, entry="other", fence=7))
        assert store.slots(SLOTS)["entry"] == Slot("entry", 3_000_000, 7, sent=1_000_100)

    def test_who_led_before_claims_and_notes_nothing_any_more(self, store: Store) -> None:
        store.change_slot(SLOTS, "claim", Slot("entry", due=1_000_000, fence=6))

        assert not store.change_slot(SLOTS, "claim", Slot("entry", due=3_000_000, fence=5))
        assert not store.change_slot(SLOTS, "note", Slot("entry", due=1_000_000, fence=5, sent=1_000_100))
        assert store.slots(SLOTS)["entry"].sent == 0

    def test_a_slot_that_was_noted_by_a_clock_ahead_is_noted_again(self, store: Store) -> None:
        store.change_slot(SLOTS, "note", Slot("entry", due=9_000_000, fence=6, sent=9_000_000))
        earlier = Slot("entry", due=5_000_000, fence=6, sent=5_000_000)

        assert store.change_slot(SLOTS, "note", earlier)
        assert store.slots(SLOTS)["entry"] == earlier

    def test_an_entry_is_forgotten_unless_a_later_leader_has_it(self, store: Store) -> None:
        for name in ("gone", "kept"):
            store.change_slot(SLOTS, "note", Slot(name, due=1_000_000, fence=6, sent=1_000_100))

        assert store.change_slot(SLOTS, "forget", Slot("gone", due=0, fence=6))
        assert not store.change_slot(SLOTS, "forget", Slot("kept", due=0, fence=5))
        assert store.slots(SLOTS).keys() == {"kept"}
