"""The markers of messages of which a run has ended, as fields of the lock's hash."""

from typing import Any

from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Answer, Done, Ending
from tests.contract.asking import KEY, SHORT, Contract, call, claim, delivery, granted, mark_queued, marker_of

DUE = Ending("ended", 60.0, is_due=True)


class Markers(Contract):
    """How long they last, and what becomes of the key."""

    def test_a_marker_keeps_the_key_for_as_long_as_it_lasts_and_not_longer(self, store: Store, client: Any) -> None:
        mine = delivery("a")
        granted(store.acquire(mine))

        assert store.release(mine, 1, ending=DUE) is Answer.MARKED

        assert client.keys() == [KEY]
        assert set(client.hkeys(KEY)) == {"fence", mine.marker}
        assert 59_000 < client.pttl(KEY) <= 60_000

    def test_a_marker_of_a_lock_that_nobody_knows_has_an_expiry(self, store: Store, client: Any) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", 30.0)

        assert 29_000 < client.pttl(KEY) <= 30_000

    def test_a_short_lease_does_not_shorten_a_marker(self, store: Store, client: Any) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", 600.0)
        mine = claim("b", ttl=SHORT)

        granted(store.acquire(mine))
        store.renew([mine], 1.0)
        store.release(mine, 1)

        assert client.pttl(KEY) > 590_000
        assert store.acquire(delivery("copy")) == Done(0, "stored")

    def test_a_marker_ends_at_its_own_deadline_in_a_key_that_is_used_on(self, store: Store) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", 2 * SHORT)
        granted(store.acquire(call("holder")))
        for _ in range(3):
            self.pass_time(0.6 * SHORT)
            store.renew([call("holder")], 1.0)
            assert store.acquire(delivery("copy")) == Done(0, "stored")
        self.pass_time(0.6 * SHORT)
        store.release(call("holder"), 1)

        granted(store.acquire(delivery("copy")))

    def test_a_marker_that_is_over_costs_a_key_that_is_used_on_nothing(self, store: Store, client: Any) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", SHORT)
        granted(store.acquire(call("holder")))
        self.pass_time(2 * SHORT)

        store.release(call("holder"), 1)

        self.nothing_is_left(store)

    def test_a_marker_that_is_over_goes_with_the_mark_of_a_call(self, store: Store) -> None:
        mark_queued(store, "q", seconds=600.0)
        store.mark_done(KEY, marker_of("a"), 0, "stored", SHORT)
        self.pass_time(2 * SHORT)

        store.unmark(KEY, "q")

        self.nothing_is_left(store)

    def test_a_living_marker_survives_all_that_ends_beside_it(self, store: Store, client: Any) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", 600.0)
        granted(store.acquire(call("holder")))
        mark_queued(store, "q")
        store.release(call("holder"), 1)
        store.unmark(KEY, "q")
        store.break_lock(KEY, None, "alice", force=True)

        assert store.acquire(delivery("copy")) == Done(0, "stored")
        assert set(client.hkeys(KEY)) <= {"fence", marker_of("a")}

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

    def test_they_are_swept_from_a_key_that_writes_no_more_of_them(self, store: Store, client: Any) -> None:
        for number in range(100):
            store.mark_done(KEY, marker_of(f"old{number}"), 0, "stored", SHORT)
        self.pass_time(0.9 * SHORT)
        for _ in range(60):
            self.pass_time(0.05 * SHORT)
            granted(store.acquire(claim("run")))
            store.release(claim("run"), 1)

        self.nothing_is_left(store)

    def test_a_fence_grows_beside_a_marker(self, store: Store) -> None:
        mine = delivery("a")
        before = granted(store.acquire(mine)).fence
        store.release(mine, 1, ending=DUE)

        assert granted(store.acquire(claim("b"))).fence > before

    def test_messages_of_one_task_id_have_markers_of_their_own(self, store: Store) -> None:
        # A task id may be used again.
        mine = delivery("original", message=1)
        granted(store.acquire(mine))
        store.release(mine, 1, ending=DUE)

        assert store.acquire(delivery("copy", message=1)) == Done(0, "ended")
        granted(store.acquire(delivery("another", message=2)))

    def test_a_key_with_nothing_but_markers_is_a_lock_that_nobody_holds(self, store: Store) -> None:
        mine = delivery("a")
        granted(store.acquire(mine))
        store.release(mine, 1, ending=DUE)

        (survey,) = store.survey([KEY])
        assert (survey.holders, survey.marks, survey.waiters) == ((), (), 0)
        assert mark_queued(store, "q", limit=1) is None
