"""A later version writes facts that this one does not know."""

from dataclasses import replace

import pytest

from celery_singleton_lock.stores.records import RELEASED, Done, Ending, Holder, Marked, Release, Renewal, Slot
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    KEY,
    SLOTS,
    Contract,
    Waiter,
    again,
    call,
    claim,
    delivery,
    found,
    granted,
    mark_newest,
    mark_queued,
    marker_of,
    queued,
    refused,
    succeed,
    successor_of,
    tokens,
)

LABEL = "supplier 7, 100 % of Müller"
MINE = {"task_id": "mine", "task_name": "shop.other", "hostname": "here", "pid": 7, "published": 5, "label": LABEL}


def written(store: Store, field: str, key: str = KEY) -> str:
    return str(store.fields(key)[field])


def write(store: Store, field: str, value: str, key: str = KEY) -> None:
    store.call("HSET", key, field, value)


def add(store: Store, field: str, more: str, key: str = KEY) -> None:
    write(store, field, written(store, field, key) + more, key)


class Versions(Contract):
    def test_a_holder_of_a_later_version_is_a_holder(self, store: Store) -> None:
        mine = claim("a", limit=2, **MINE)
        granted(store.acquire(mine))
        (before,) = store.holders(KEY)
        assert {name: getattr(before, name) for name in MINE} == MINE
        add(store, "1:", " 6000 soon")
        add(store, "1:n", "\x1fmore")
        write(store, "1:zone", "b")
        write(store, "paused", "no")

        (holder,) = store.holders(KEY)
        assert replace(holder, expires_in=0.0) == replace(before, expires_in=0.0)
        conflict = refused(store.acquire(claim("b")))
        assert replace(conflict.first, expires_in=0.0) == replace(before, expires_in=0.0)
        assert refused(store.acquire(replace(delivery("copy", "mine"), limit=2))).is_own
        assert store.renew([mine], 1.0) == [Renewal.RENEWED]
        other = claim("c", limit=2, **MINE)
        assert granted(store.acquire(other)).place == 2
        assert store.release(mine, 1, Ending("ended", 60.0, is_due=True)) == Release("left")
        assert tokens(store.holders(KEY)) == ["c"]
        store.release(other, 2)
        assert not granted(store.acquire(claim("d"))).took_over

    def test_a_later_version_is_asked_to_stop_and_dies_like_any_other(self, store: Store) -> None:
        mine = claim("a", **MINE)
        granted(store.acquire(mine))
        add(store, "1:", " 6000 soon")
        add(store, "1:n", "\x1fmore")

        asked, _ = Inventory(store).break_lock(KEY, ["a"], "alice")
        assert [each.label for each in asked] == [LABEL]
        assert store.renew([mine], 1.0) == [Renewal.BROKEN]
        write(store, "!a", "1")
        grant = granted(store.acquire(claim("b")))
        assert (grant.died.task_name, grant.died.label) == ("shop.other", LABEL)

    @pytest.mark.parametrize("more", [",9,soon", "\x1fmore"])
    def test_a_mark_of_a_later_version_is_a_mark(self, store: Store, more: str) -> None:
        mark_queued(store, "q", label=LABEL, queue="imports", published=5, due_for=3.0, cooldown=50.0)
        add(store, "queued", more)
        add(store, "cooldown", more if more[0] != "," else "\x1f")

        assert found(mark_queued(store, "another")).task_id == "q"
        assert found(mark_queued(store, "another")).published == 5
        marks = {mark.state: mark for mark in store.survey([KEY])[0].marks}
        queued = marks["queued"]
        assert (queued.task_id, queued.label, queued.queue, queued.due_for) == ("q", LABEL, "imports", 3.0)
        assert marks["cooldown"].task_id == "q"
        refused(store.acquire(replace(call("b"), heeds_queued=True)))
        granted(store.acquire(replace(call("q"), heeds_queued=True)))
        assert store.survey([KEY])[0].queued is None

    def test_a_newer_call_takes_the_place_of_one_that_a_later_version_has_marked(self, store: Store) -> None:
        mark_newest(store, call("old", 1))
        add(store, "queued", ",7,soon")

        assert mark_newest(store, call("new", 2)) == Marked()
        assert store.survey([KEY])[0].queued == "new"

    def test_a_successor_of_a_later_version_is_the_successor(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        assert succeed(store, call("first", 1), "rerun") == "first"
        add(store, "next", "\x1fmore")

        assert successor_of(store) == "first"
        assert succeed(store, again(call("second", 2)), "rerun") == "second"

    def test_a_kind_of_successor_that_is_not_known_keeps_its_place_until_it_has_run(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        succeed(store, call("first", 1), "rerun")
        write(store, "next", written(store, "next").replace("rerun", "rewrite"))
        store.release(call("holder"), 1)

        refused(store.acquire(call("stranger")))
        granted(store.acquire(again(call("first", 1))))

    def test_a_turn_of_a_later_version_is_a_turn(self, store: Store) -> None:
        granted(store.acquire(claim("a")))
        with Waiter(store, claim("w")) as waiter, Waiter(store, claim("later")) as later:
            queued(waiter.ask())
            queued(later.ask())
            for field in [field for field in store.fields(KEY) if field[0] == "q" and field[1:].isdigit()]:
                write(store, field, written(store, field).replace("\x1f", " 7 soon\x1f"))

            assert [turn.token for turn in store.survey([KEY])[0].turns] == ["w", "later"]
            store.release(claim("a"), 1)
            refused(store.acquire(claim("newcomer")))
            queued(later.ask())
            granted(waiter.ask())

    def test_a_marker_of_a_later_version_is_a_marker(self, store: Store) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", 60.0)
        add(store, marker_of("a"), " more")

        assert store.acquire(delivery("copy")) == Done(0, "stored")

    def test_a_slot_of_a_later_version_is_a_slot(self, store: Store) -> None:
        slot = Slot("entry", due=1_000_000, fence=5)
        store.change_slot(SLOTS, "claim", slot)
        store.change_slot(SLOTS, "note", replace(slot, sent=1_000_100))
        add(store, "entry", " 12 soon", SLOTS)

        assert store.slots(SLOTS) == {"entry": replace(slot, sent=1_000_100)}
        assert not store.change_slot(SLOTS, "claim", replace(slot, fence=6)), "it was sent"
        assert not store.change_slot(SLOTS, "claim", replace(slot, due=2_000_000, fence=4)), "a later leader has come"
        assert store.change_slot(SLOTS, "claim", replace(slot, due=2_000_000, fence=6))
        assert store.slots(SLOTS)["entry"] == Slot("entry", 2_000_000, 6, sent=1_000_100)

    def test_a_hash_has_fields_that_are_not_known(self, store: Store) -> None:
        write(store, "paused", "until tomorrow")
        store.call("PEXPIRE", KEY, "60000")
        mine = claim("a")

        granted(store.acquire(mine))
        refused(store.acquire(claim("b")))
        assert [holder.token for holder in store.holders(KEY)] == ["a"]
        assert isinstance(store.holders(KEY)[0], Holder)
        assert store.renew([mine], 1.0) == [Renewal.RENEWED]
        assert store.release(mine, 1) == RELEASED
        assert written(store, "paused") == "until tomorrow"
        granted(store.acquire(claim("b")))
