"""What a lock leaves in a server, and for how long."""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Done, Ending, Renewal, Slot
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    CLOCKS_DIFFER_BY,
    KEY,
    SHORT,
    SLOTS,
    Contract,
    again,
    begin,
    call,
    claim,
    delivery,
    granted,
    mark_newest,
    mark_queued,
    marker_of,
    succeeding,
)
from tests.waiting import until

DUE = Ending("ended", 60.0, is_due=True)

REAL = 0.3
"""A ttl that a test waits for."""

NEWEST = [
    succeeding(again(call(name, at, heeds_queued=True, queued_for=60.0)), "rerun") for name, at in [("b", 2), ("c", 3)]
]


class Keys(Contract):
    def test_a_lock_is_one_key(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", limit=3))
        store.acquire(claim("b", limit=3))

        assert client.keys() == [KEY]

    def steps(self, store: Store) -> dict[str, Callable[[], Any]]:
        a, b = delivery("tok-a", "a", limit=2), delivery("tok-b", "b")
        waits = delivery("tok-w", "w", turn_for=90.0, waits_here=True)
        return {
            "acquire": lambda: store.acquire(dataclasses.replace(a, may_be_copy=False)),
            "acquire another": lambda: store.acquire(b),
            "acquire a copy": lambda: store.acquire(delivery("tok-c", "a", limit=2)),
            "take a turn": lambda: store.acquire(waits),
            "renew": lambda: store.renew([a, b], 1.0),
            "release": lambda: store.release(a, None, ending=DUE),
            "release another": lambda: store.release(dataclasses.replace(b, min_hold=5.0), None),
            "release the turn": lambda: store.release(waits, None),
            "mark_queued": lambda: mark_queued(store, "b", limit=1, cooldown=30.0),
            "mark the newest": lambda: [mark_newest(store, each) for each in NEWEST],
            "begin the newest": lambda: [begin(store, each) for each in NEWEST],
            "rerun": lambda: [store.acquire(succeeding(call(name, at), "rerun")) for name, at in [("b", 2), ("c", 3)]],
            "replace": lambda: [
                store.acquire(succeeding(again(call(name, at)), "replace")) for name, at in [("b", 2), ("c", 3)]
            ],
            "unmark": lambda: [store.unmark(KEY, name) for name in ("a", "b", "c")],
            "unmark if it may": lambda: store.unmark(KEY, "b", ends_cooldown=False, heeds=True),
            "mark_done": lambda: store.mark_done(KEY, marker_of("a"), 1, "stored", 30.0),
            "break": lambda: Inventory(store).break_lock(KEY, ["tok-b"], "alice"),
        }

    def test_every_key_has_an_expiry_whatever_is_done_in_whatever_order(self, store: Store, client: Any) -> None:
        steps = self.steps(store)
        orders = list(itertools.permutations(steps, 3))

        for order in random.Random(5).sample(orders, len(orders) // 4):
            client.flushdb()
            for name in order:
                steps[name]()
                assert all(client.pttl(key) > 0 for key in client.scan_iter()), order

    def test_when_all_is_over_no_key_is_left_whatever_was_done(self, store: Store, client: Any) -> None:
        steps = self.steps(store)
        orders = [random.Random(number).sample(list(steps), len(steps)) for number in range(100)]
        is_the_end = ("release", "release another", "release the turn", "unmark")

        for order in orders:
            client.flushdb()
            for name in order:
                steps[name]()
            self.pass_time(5.0)  # a cool-down
            for name in is_the_end:
                steps[name]()
            for mine in (delivery("tok-c", "a"), call("b"), call("c")):
                store.release(mine, None)
            # It takes the place of a cool-down that is over.
            store.release(call("z"), granted(store.acquire(call("z"))).place)
            left = client.hkeys(KEY)
            assert set(left) <= {"fence", marker_of("a")}, (order, client.hgetall(KEY))
            assert left == [] or marker_of("a") in left, order

    def test_the_key_of_a_dead_holder_is_gone_two_ttl_after_its_last_renewal(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", ttl=REAL))
        renewed = clock()
        store.renew([claim("a", ttl=REAL)], 1.0)

        until(lambda: not store.holders(KEY), "nobody holds it")
        still_there = client.exists(KEY)
        until(lambda: not client.exists(KEY), "the key is gone")

        assert still_there or clock() > renewed + 2 * REAL
        assert clock() >= renewed + 2 * REAL - CLOCKS_DIFFER_BY

    def test_a_key_of_another_kind_is_left_alone(self, store: Store, client: Any) -> None:
        client.set(KEY, "somebody else's")

        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.acquire(claim("a"))

        assert client.get(KEY) == "somebody else's"

    @pytest.mark.parametrize("overwritten", [0, 1, 2])
    def test_a_key_that_was_overwritten_costs_no_other_lease_its_renewal(
        self, store: Store, client: Any, overwritten: int
    ) -> None:
        claims = [claim("a", key=f"singleton:v3:{{of one process:{number}}}", ttl=5) for number in range(3)]
        for mine in claims:
            granted(store.acquire(mine))
        client.set(claims[overwritten].key, "somebody else's")

        answers = store.renew([dataclasses.replace(mine, ttl=30) for mine in claims], 1.0)

        assert answers == [Renewal.TAKEN if number == overwritten else Renewal.RENEWED for number in range(3)]
        assert client.get(claims[overwritten].key) == "somebody else's"
        for number in {0, 1, 2} - {overwritten}:
            assert client.pttl(claims[number].key) > 50_000

    def test_a_fence_is_the_servers_time_in_microseconds_or_more(self, store: Store, client: Any) -> None:
        seconds, microseconds = client.time()

        grant = granted(store.acquire(claim("a")))

        assert grant.fence >= seconds * 1_000_000 + microseconds

    def test_a_living_marker_survives_all_that_ends_beside_it(self, store: Store, client: Any) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", 600.0)
        granted(store.acquire(call("holder")))
        mark_queued(store, "q")
        store.release(call("holder"), 1)
        store.unmark(KEY, "q")
        Inventory(store).break_lock(KEY, [], "alice", marks=True)

        assert store.acquire(delivery("copy")) == Done(0, "stored")
        assert set(client.hkeys(KEY)) <= {"fence", marker_of("a")}

    def test_what_is_no_lock_has_an_end_as_well(self, store: Store, client: Any) -> None:
        store.change_slot(SLOTS, "claim", Slot("entry", 1, 1))
        store.count("singleton:v3:stats", {"acquired::a": 1}, 1.0)
        store.record("singleton:v3:history", ["an event"], 1.0)

        found = client.keys()
        assert len(found) == 3
        assert [key for key in found if client.pttl(key) <= 0] == []

    def test_many_markers_that_are_over_do_not_pile_up_in_a_key_that_is_used_on(
        self, store: Store, client: Any
    ) -> None:
        granted(store.acquire(claim("holder", ttl=10_000.0)))
        for number in range(200):
            store.mark_done(KEY, marker_of(f"old{number}"), 0, "stored", SHORT)
        self.pass_time(2 * SHORT)
        for number in range(200):
            store.mark_done(KEY, marker_of(f"new{number}"), 0, "stored", 600.0)

        left = client.hkeys(KEY)
        assert sum(field.startswith("done:new") for field in left) == 200
        assert sum(field.startswith("done:old") for field in left) < 50
