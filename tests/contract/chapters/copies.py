"""One message, one body: what the later deliveries of a message find."""

import pytest

from celery_singleton_lock.stores.records import RELEASED, Done, Ending, Release, Succession
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    KEY,
    SHORT,
    Contract,
    Waiter,
    call,
    claim,
    delivery,
    granted,
    marker_of,
    queued,
    refused,
    succeeding,
    successor_of,
    tokens,
)

KEPT = 3600.0
RESULT_GRACE = 5.0
ENDED, RETRIED = Ending("ended", KEPT, is_due=False), Ending("retried", KEPT, is_due=False)
DUE = Ending("ended", KEPT, is_due=True)


class Copies(Contract):
    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_copy_of_a_run_that_lives_gets_no_place_beside_it(self, store: Store, limit: int) -> None:
        granted(store.acquire(delivery("original", limit=limit)))

        conflict = refused(store.acquire(delivery("copy", limit=limit)))

        assert conflict.is_own
        assert (conflict.first.token, conflict.first.task_id) == ("original", "a")
        assert tokens(store.holders(KEY)) == ["original"]

    def test_equal_ids_alone_make_no_copy(self, store: Store) -> None:
        # A broadcast has one id for all its messages.
        granted(store.acquire(claim("original", limit=2, task_id="a")))

        granted(store.acquire(claim("second", limit=2, task_id="a")))
        assert not refused(store.acquire(claim("third", limit=2, task_id="a"))).is_own

    @pytest.mark.parametrize("rule", ["rerun", "replace"])
    def test_a_copy_leaves_no_turn_and_no_mark(self, store: Store, rule: Succession) -> None:
        granted(store.acquire(delivery("original")))
        conflict = refused(store.acquire(succeeding(delivery("copy", heeds_queued=True, newest="next"), rule)))
        assert conflict.is_own
        assert conflict.successor is None
        with Waiter(store, delivery("waits")) as waiter:
            assert refused(waiter.ask()).is_own

            assert store.release(delivery("waits"), None) == Release("none", "taken")

        assert successor_of(store) is None
        assert store.release(delivery("original"), 1) == RELEASED
        self.nothing_is_left(store)

    def test_a_copy_of_a_delivery_that_waits_in_its_slot_does_not_wait_beside_it(self, store: Store) -> None:
        granted(store.acquire(claim("before")))
        with Waiter(store, delivery("original")) as waiter:
            queued(waiter.ask())

            conflict = refused(store.acquire(delivery("copy")))

            assert conflict.is_own
            assert (conflict.first.state, conflict.first.token) == ("waiting", "original")
            store.release(claim("before"), 1)
            granted(waiter.ask())
            assert store.release(delivery("original"), 1, ending=ENDED) == Release("left"), "a copy has met it"
        assert store.acquire(delivery("copy")) == Done(0, "ended")

    def test_a_later_attempt_waits_for_the_one_before_which_need_not_know(self, store: Store) -> None:
        granted(store.acquire(delivery("original", attempt=0)))
        assert refused(store.acquire(delivery("retry", attempt=1))).is_own

        assert store.release(delivery("original"), 1, ending=RETRIED) == RELEASED, "it was no copy"
        granted(store.acquire(delivery("retry", attempt=1)))

    @pytest.mark.parametrize("place", [1, None])
    def test_a_run_that_no_copy_has_met_leaves_no_marker(self, store: Store, place: int | None) -> None:
        granted(store.acquire(delivery("original")))

        assert store.release(delivery("original"), place, ending=ENDED) == RELEASED

        granted(store.acquire(delivery("copy")))

    def test_a_run_that_a_copy_has_met_leaves_a_marker_for_it(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))
        refused(store.acquire(delivery("copy")))

        assert store.release(delivery("original"), 1, ending=ENDED) == Release("left")

        assert store.acquire(delivery("copy")) == Done(0, "ended")
        with Waiter(store, delivery("waits")) as waiter:
            assert waiter.ask() == Done(0, "ended")
        (survey,) = store.survey([KEY])
        assert (survey.places, survey.marks, survey.waiting) == ((), (), 0)

    @pytest.mark.parametrize("is_taken", [False, True])
    def test_a_run_that_has_lost_its_lease_leaves_a_marker_and_says_so(self, store: Store, is_taken: bool) -> None:
        granted(store.acquire(delivery("original")))
        store.call("DEL", KEY)
        if is_taken:
            granted(store.acquire(delivery("other", "b")))

        released = store.release(delivery("original"), 1, ending=ENDED)

        assert released == Release("left", "taken" if is_taken else "expired")
        assert store.acquire(delivery("copy")) == Done(0, "ended")

    def test_a_copy_that_is_not_known_as_one_finds_the_marker_of_its_message(self, store: Store) -> None:
        # With SQS, which marks no message that it delivers again.
        original = claim("original", task_id="a", published=5)
        original.message = 5
        granted(store.acquire(original))
        store.release(original, 1, DUE)

        assert store.acquire(claim("copy", task_id="a", published=5)) == Done(0, "ended")
        granted(store.acquire(claim("a call that uses the id again", task_id="a", published=6)))

    def test_an_ending_whose_result_was_not_stored_for_long_is_none(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))
        store.release(delivery("original"), 1, ending=DUE)

        self.pass_time(RESULT_GRACE - 1)
        assert store.acquire(delivery("copy")) == Done(0, "ended")
        self.pass_time(2)

        granted(store.acquire(delivery("copy")))

    def test_an_ending_whose_result_was_stored_lasts_for_as_long_as_copies_come(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))
        store.release(delivery("original"), 1, ending=DUE)
        store.mark_done(KEY, marker_of("a"), 0, "stored", KEPT)
        # Again, because the answer to the first release was lost.
        store.release(delivery("original"), 1, ending=DUE)

        for _ in range(3):
            # Each copy that waited in a worker for longer than the visibility timeout has another one behind it.
            self.pass_time(KEPT - 100)
            assert store.acquire(delivery("copy")) == Done(0, "stored")
        self.pass_time(KEPT + 100)

        granted(store.acquire(delivery("copy")))

    def test_an_attempt_that_was_retried_is_over_and_the_next_is_not(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))
        refused(store.acquire(delivery("copy")))
        assert store.release(delivery("original"), 1, ending=RETRIED) == Release("left")

        self.pass_time(2 * RESULT_GRACE)
        assert store.acquire(delivery("copy")) == Done(0, "retried")
        granted(store.acquire(delivery("retry", attempt=1)))

    def test_a_later_attempt_is_not_kept_out_by_the_cool_down_of_the_one_before(self, store: Store) -> None:
        original = delivery("original", min_hold=3 * SHORT)
        granted(store.acquire(original))
        store.release(original, 1, ending=RETRIED)

        refused(store.acquire(call("other")))
        grant = granted(store.acquire(delivery("retry", attempt=1)))

        assert (grant.place, grant.took_over) == (1, False)
        assert tokens(store.holders(KEY)) == ["retry"]
