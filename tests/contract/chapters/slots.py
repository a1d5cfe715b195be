"""Slots of a beat's entries."""

import dataclasses

from celery_singleton_lock.stores.records import Slot
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import SLOTS, Contract


class Slots(Contract):
    """Slots of a beat's entries."""

    def test_a_slot_is_claimed_until_it_was_sent(self, store: Store) -> None:
        slot = Slot("entry", due=1_000_000, fence=5)
        assert store.claim_slot(SLOTS, slot)
        assert store.claim_slot(SLOTS, dataclasses.replace(slot, fence=6)), "the heir sends what was not sent"
        assert store.note_slot(SLOTS, dataclasses.replace(slot, fence=6, sent=1_000_100))

        assert not store.claim_slot(SLOTS, dataclasses.replace(slot, fence=7))
        assert store.claim_slot(SLOTS, Slot("entry", due=3_000_000, fence=7))
        assert store.claim_slot(SLOTS, dataclasses.replace(slot, entry="other", fence=7))
        assert store.slots(SLOTS)["entry"] == Slot("entry", 3_000_000, 7, sent=1_000_100)

    def test_who_led_before_claims_and_notes_nothing_any_more(self, store: Store) -> None:
        store.claim_slot(SLOTS, Slot("entry", due=1_000_000, fence=6))

        assert not store.claim_slot(SLOTS, Slot("entry", due=3_000_000, fence=5))
        assert not store.note_slot(SLOTS, Slot("entry", due=1_000_000, fence=5, sent=1_000_100))
        assert store.slots(SLOTS)["entry"].sent == 0

    def test_an_entry_is_forgotten_unless_a_later_leader_has_it(self, store: Store) -> None:
        for name in ("gone", "kept"):
            store.claim_slot(SLOTS, Slot(name, due=1_000_000, fence=6))

        assert store.forget_slot(SLOTS, Slot("gone", due=0, fence=6))
        assert not store.forget_slot(SLOTS, Slot("kept", due=0, fence=5))
        assert store.slots(SLOTS).keys() == {"kept"}
