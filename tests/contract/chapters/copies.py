"""One message, one body: what the later deliveries of a message find."""

import dataclasses

import pytest

from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Answer, Claim, Done, Ending, Succession
from tests.contract.asking import (
    KEY,
    SHORT,
    Contract,
    call,
    claim,
    delivery,
    granted,
    mark_queued,
    marker_of,
    queued,
    refused,
    succeed,
    succeeding,
    successor_of,
    tokens,
)

KEPT = 3600.0
RESULT_GRACE = 5.0
ENDED, RETRIED = Ending("ended", KEPT, is_due=False), Ending("retried", KEPT, is_due=False)
DUE = Ending("ended", KEPT, is_due=True)


def first_delivery(token: str = "original") -> Claim:
    """The same message, when nothing says that it was delivered before."""
    return dataclasses.replace(delivery(token), may_be_copy=False)


class Copies(Contract):
    """Copies of runs that live, and of runs that have ended."""

    # The run lives.

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_copy_of_a_run_that_lives_gets_no_place_beside_it(self, store: Store, limit: int) -> None:
        granted(store.acquire(delivery("original", limit=limit)))

        conflict = refused(store.acquire(delivery("copy", limit=limit)))

        assert conflict.is_own
        assert (conflict.first.token, conflict.first.task_id) == ("original", "a")
        assert tokens(store.holders(KEY)) == ["original"]

    def test_a_refusal_by_another_message_is_none_by_itself(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))

        assert not refused(store.acquire(delivery("other", "b"))).is_own
        assert not refused(store.acquire(claim("no-task"))).is_own

    def test_equal_ids_alone_make_no_copy(self, store: Store) -> None:
        # A broadcast has one id for all its messages.
        granted(store.acquire(claim("original", limit=2, task_id="a")))

        granted(store.acquire(claim("second", limit=2, task_id="a")))
        assert not refused(store.acquire(claim("third", limit=2, task_id="a"))).is_own

    def test_a_delivery_whose_reply_was_lost_is_not_taken_for_its_own_copy(self, store: Store) -> None:
        before = granted(store.acquire(delivery("original")))

        assert granted(store.acquire(delivery("original"))).fence == before.fence

    @pytest.mark.parametrize("rule", ["rerun", "replace"])
    def test_a_copy_leaves_no_turn_and_no_mark(self, store: Store, rule: Succession) -> None:
        granted(store.acquire(delivery("original")))
        conflict = refused(store.acquire(succeeding(delivery("copy", heeds_queued=True, asked=True), rule)))
        assert conflict.is_own
        assert conflict.successor is None
        with store.waiter(delivery("waits")) as waiter:
            assert refused(waiter.ask()).is_own

            assert store.release(delivery("waits"), None) is Answer.TAKEN

        assert successor_of(store) is None
        assert store.release(delivery("original"), 1) is Answer.DONE
        self.nothing_is_left(store)

    def test_a_copy_that_runs_ends_what_its_original_has_left(self, store: Store) -> None:
        granted(store.acquire(call("holder", 1000)))
        original = call("a", 3000)
        assert succeed(store, original, "rerun") == "a"
        store.release(call("holder"), 1)

        copy = dataclasses.replace(original, token="copy", may_be_copy=True)
        grant = granted(store.acquire(copy))

        store.release(copy, grant.place)
        self.nothing_is_left(store)

    def test_a_copy_of_a_run_that_waits_takes_no_turn(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        with store.waiter(first_delivery()) as original:
            queued(original.ask())
            with store.waiter(delivery("copy", limit=2)) as copy:
                conflict = refused(copy.ask())
            assert conflict.is_own
            assert (conflict.first.token, conflict.first.task_id) == ("original", "a")
            assert refused(store.acquire(delivery("copy", limit=2))).is_own
            assert store.release(delivery("copy"), None) is Answer.TAKEN

            store.release(call("holder"), 1)
            granted(original.ask())
        assert store.release(first_delivery(), 1, ending=ENDED) is Answer.MARKED, "though none has come since it began"
        assert store.acquire(delivery("copy")) == Done(0, "ended")

    def test_a_run_that_has_waited_and_met_no_copy_leaves_no_marker(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        with store.waiter(first_delivery()) as original:
            queued(original.ask())
            store.release(call("holder"), 1)
            granted(original.ask())

        assert store.release(first_delivery(), 1, ending=ENDED) is Answer.DONE
        self.nothing_is_left(store)

    def test_a_waiter_is_no_copy_of_itself(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        with store.waiter(delivery("original")) as original:
            queued(original.ask())
            queued(original.ask())
            store.release(call("holder"), 1)
            granted(original.ask())

    @pytest.mark.parametrize("ends", ["late", "leaves"])
    def test_a_copy_takes_the_turn_of_a_waiter_that_is_gone(self, store: Store, ends: str) -> None:
        granted(store.acquire(call("holder")))
        with store.waiter(first_delivery()) as original:
            queued(original.ask())
            if ends == "leaves":
                store.release(first_delivery(), None)
            else:
                store.renew([call("holder")], 1.0)
                self.pass_time(25)
                store.renew([call("holder")], 1.0)
                self.pass_time(25)
        store.renew([call("holder")], 1.0)

        with store.waiter(delivery("copy")) as copy:
            queued(copy.ask())

    def test_a_copy_that_is_late_for_its_turn_takes_none_from_those_behind_it(self, store: Store) -> None:
        granted(store.acquire(claim("holder", ttl=6 * SHORT)))
        with store.waiter(delivery("late")) as late, store.waiter(claim("w")) as behind:
            queued(late.ask())
            self.pass_time(2 * SHORT)
            queued(behind.ask())
            # Its own turn has ended, and that of the other has not.
            self.pass_time(1.5 * SHORT)
            queued(late.ask())
            store.release(claim("holder"), 1)
            granted(late.ask())
            store.release(delivery("late"), 1)

            refused(store.acquire(claim("newcomer")))
            granted(behind.ask())

    def test_equal_ids_alone_make_no_copy_of_a_waiter(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        with store.waiter(first_delivery()) as original, store.waiter(first_delivery("sibling")) as sibling:
            queued(original.ask())
            queued(sibling.ask())

    def test_a_copy_takes_over_from_a_run_that_is_dead(self, store: Store) -> None:
        granted(store.acquire(claim("original", ttl=SHORT, task_id="a")))
        self.let_expire(store)

        assert granted(store.acquire(delivery("copy"))).took_over

    def test_a_later_attempt_waits_for_the_one_before_which_need_not_know(self, store: Store) -> None:
        granted(store.acquire(delivery("original", attempt=0)))
        assert refused(store.acquire(delivery("retry", attempt=1))).is_own

        assert store.release(delivery("original"), 1, ending=RETRIED) is Answer.DONE, "it was no copy"
        granted(store.acquire(delivery("retry", attempt=1)))

    # The run has ended.

    @pytest.mark.parametrize("place", [1, None])
    def test_a_run_that_no_copy_has_met_leaves_no_marker(self, store: Store, place: int | None) -> None:
        granted(store.acquire(delivery("original")))

        assert store.release(delivery("original"), place, ending=ENDED) is Answer.DONE

        granted(store.acquire(delivery("copy")))

    def test_a_run_that_a_copy_has_met_leaves_a_marker_for_it(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))
        refused(store.acquire(delivery("copy")))

        assert store.release(delivery("original"), 1, ending=ENDED) is Answer.MARKED

        assert store.acquire(delivery("copy")) == Done(0, "ended")
        with store.waiter(delivery("waits")) as waiter:
            assert waiter.ask() == Done(0, "ended")
        (survey,) = store.survey([KEY])
        assert (survey.holders, survey.marks, survey.waiters) == ((), (), 0)

    def test_a_run_that_is_likely_to_be_delivered_again_leaves_a_marker(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))

        assert store.release(delivery("original"), 1, ending=DUE) is Answer.MARKED

        assert store.acquire(delivery("copy")) == Done(0, "ended")
        granted(store.acquire(delivery("other", "b")))

    @pytest.mark.parametrize("place", [1, None])
    @pytest.mark.parametrize("min_hold", [0.0, SHORT])
    def test_a_marker_is_left_whatever_becomes_of_the_place(
        self, store: Store, place: int | None, min_hold: float
    ) -> None:
        original = delivery("original", min_hold=min_hold)
        granted(store.acquire(original))
        refused(store.acquire(delivery("copy")))

        assert store.release(original, place, ending=ENDED) is Answer.MARKED

        assert store.acquire(delivery("copy")) == Done(0, "ended")

    @pytest.mark.parametrize("taken", [True, False])
    def test_a_run_that_lost_its_place_leaves_a_marker_as_well(self, store: Store, taken: bool) -> None:
        granted(store.acquire(claim("original", ttl=SHORT, task_id="a")))
        self.pass_time(3 * SHORT)
        if taken:
            granted(store.acquire(call("other")))

        answer = store.release(delivery("original"), 1, ending=ENDED)

        assert answer is (Answer.TAKEN if taken else Answer.GONE)
        assert store.acquire(delivery("copy")) == Done(0, "ended")

    def test_an_ending_whose_result_was_not_stored_for_long_is_none(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))
        store.release(delivery("original"), 1, ending=DUE)

        self.pass_time(RESULT_GRACE - 1)
        assert store.acquire(delivery("copy")) == Done(0, "ended")
        self.pass_time(2)

        granted(store.acquire(delivery("copy")))

    def test_an_ending_whose_result_was_stored_lasts(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))
        store.release(delivery("original"), 1, ending=DUE)
        store.mark_done(KEY, marker_of("a"), 0, "stored", KEPT)

        self.pass_time(KEPT - 100)
        assert store.acquire(delivery("copy")) == Done(0, "stored")
        self.pass_time(200)

        granted(store.acquire(delivery("copy")))

    def test_an_attempt_that_was_retried_is_over_and_the_next_is_not(self, store: Store) -> None:
        granted(store.acquire(delivery("original")))
        refused(store.acquire(delivery("copy")))
        assert store.release(delivery("original"), 1, ending=RETRIED) is Answer.MARKED

        self.pass_time(2 * RESULT_GRACE)
        assert store.acquire(delivery("copy")) == Done(0, "retried")
        granted(store.acquire(delivery("retry", attempt=1)))

    def test_an_attempt_that_has_ended_is_the_end_of_those_before(self, store: Store) -> None:
        store.mark_done(KEY, marker_of("a"), 2, "stored", KEPT)

        answers = [store.acquire(delivery(f"copy{attempt}", attempt=attempt)) for attempt in range(3)]

        assert answers == [Done(2, "stored")] * 3
        granted(store.acquire(delivery("retry", attempt=3)))

    def test_what_is_known_of_a_later_attempt_stays(self, store: Store) -> None:
        store.mark_done(KEY, marker_of("a"), 1, "stored", KEPT)
        store.mark_done(KEY, marker_of("a"), 0, "stored", KEPT)
        granted(store.acquire(claim("original", task_id="a")))
        store.release(delivery("original", attempt=0), 1, ending=DUE)

        assert store.acquire(delivery("copy", attempt=1)) == Done(1, "stored")

    def test_the_last_word_on_an_attempt_stays(self, store: Store) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", KEPT)
        granted(store.acquire(claim("original", task_id="a")))
        store.release(delivery("original"), 1, ending=DUE)

        assert store.acquire(delivery("copy")) == Done(0, "stored")

    def test_a_message_that_is_no_copy_asks_for_no_marker(self, store: Store) -> None:
        store.mark_done(KEY, marker_of("a"), 0, "stored", KEPT)

        granted(store.acquire(claim("again", task_id="a")))

    # Its own cool-down.

    def test_a_later_attempt_is_not_kept_out_by_the_cool_down_of_the_one_before(self, store: Store) -> None:
        original = delivery("original", min_hold=3 * SHORT)
        granted(store.acquire(original))
        store.release(original, 1, ending=RETRIED)

        refused(store.acquire(call("other")))
        grant = granted(store.acquire(delivery("retry", attempt=1)))

        assert (grant.place, grant.took_over) == (1, False)
        assert tokens(store.holders(KEY)) == ["retry"]

    def test_a_later_attempt_takes_the_place_of_its_own_cool_down(self, store: Store) -> None:
        granted(store.acquire(call("b", limit=2)))
        original = delivery("original", min_hold=3 * SHORT, limit=2)
        granted(store.acquire(original))
        store.release(original, 2)
        store.release(call("b", limit=2), 1)

        assert granted(store.acquire(delivery("retry", attempt=1, limit=2))).place == 2
        assert granted(store.acquire(call("c", limit=2))).place == 1

    def test_a_cool_down_of_another_call_keeps_an_attempt_out(self, store: Store) -> None:
        original = delivery("original", "b", min_hold=3 * SHORT)
        granted(store.acquire(original))
        store.release(original, 1)

        assert not refused(store.acquire(delivery("retry", attempt=1))).is_own

    def test_a_copy_of_the_attempt_before_is_kept_out_by_its_cool_down(self, store: Store) -> None:
        original = delivery("original", min_hold=3 * SHORT)
        granted(store.acquire(original))
        store.release(original, 1)

        assert not refused(store.acquire(delivery("copy"))).is_own

    def test_a_cool_down_goes_on_for_others_while_a_later_attempt_is_kept_out_by_them(self, store: Store) -> None:
        original = delivery("original", min_hold=3 * SHORT)
        granted(store.acquire(original))
        store.release(original, 1)
        succeed(store, call("next"), "rerun")

        assert refused(store.acquire(delivery("retry", attempt=1))).first.task_id == "next"
        store.unmark(KEY, "next")

        refused(store.acquire(call("other")))
        assert mark_queued(store, "other", limit=1) is not None
        granted(store.acquire(delivery("retry", attempt=1)))
