"""The markers of messages of which a run has ended, as fields of the lock's hash."""

from typing import Any

from celery_singleton_lock.stores.records import Done, Ending, Marked, Release, Slot
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import KEY, SHORT, SLOTS, Contract, call, claim, delivery, granted, mark_queued, marker_of

DUE = Ending("ended", 60.0, is_due=True)


class Markers(Contract):
    """How long they last, and what becomes of the key."""

    def test_a_marker_keeps_the_key_for_as_long_as_it_lasts_and_not_longer(self, store: Store, client: Any) -> None:
        mine = delivery("a")
        granted(store.acquire(mine))

        assert store.release(mine, 1, ending=DUE) == Release("left")

        assert client.keys() == [KEY]
        assert set(client.hkeys(KEY)) == {"fence", mine.marker}
        assert 59_000 < client.pttl(KEY) <= 60_000

    def test_a_living_marker_survives_all_that_ends_beside_it(self, store: Store, client: Any) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", 600.0)
        granted(store.acquire(call("holder")))
        mark_queued(store, "q")
        store.release(call("holder"), 1)
        store.unmark(KEY, "q")
        Inventory(store).break_lock(KEY, [], "alice", marks=True)

        assert store.acquire(delivery("copy")) == Done(0, "stored")
        assert set(client.hkeys(KEY)) <= {"fence", marker_of("a")}

    def test_every_key_has_an_end(self, store: Store, client: Any) -> None:
        store.acquire(call("a"))
        mark_queued(store, "q")
        store.mark_done(KEY, marker_of("a"), 0, "stored", 60.0)
        store.claim_slot(SLOTS, Slot("entry", 1, 1))
        store.count("singleton:v3:stats", {"acquired::a": 1}, 1.0)

        assert all(client.pttl(key) > 0 for key in (KEY, SLOTS, "singleton:v3:stats"))

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

    def test_a_key_with_nothing_but_markers_is_a_lock_that_nobody_holds(self, store: Store) -> None:
        mine = delivery("a")
        granted(store.acquire(mine))
        store.release(mine, 1, ending=DUE)

        (survey,) = store.survey([KEY])
        assert (survey.places, survey.marks, survey.waiters) == ((), (), 0)
        assert mark_queued(store, "q", limit=1) == Marked()
