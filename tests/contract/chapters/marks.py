"""What calls leave in a store that hold nothing: queued, and quiet."""

from typing import Any

import pytest

from celery_singleton_lock.stores.base import Store
from tests.contract.asking import (
    KEY,
    SHORT,
    Contract,
    call,
    claim,
    found,
    granted,
    mark_queued,
    queued,
    refused,
    succeed,
    successor_of,
)


class Marks(Contract):
    """Calls that are unique in the queue."""

    def test_of_several_calls_one_is_queued_and_the_others_learn_which(self, store: Store) -> None:
        assert mark_queued(store, "a") is None
        assert [found(mark_queued(store, other)).task_id for other in ("b", "c")] == ["a", "a"]
        assert mark_queued(store, "a") is None, "a lost reply costs no call"
        granted(store.acquire(call("member")))
        assert mark_queued(store, "a", limit=1) is None, "nor does a run that has begun meanwhile"
        assert found(mark_queued(store, "b", limit=1)).task_id == "a"

    def test_a_queued_call_that_is_refused_counts_as_queued_for_as_long_again(self, store: Store) -> None:
        mark_queued(store, "a", seconds=60.0)
        granted(store.acquire(call("holder")))
        refused(store.acquire(call("a", heeds_queued=True, queued_for=600.0)))

        assert found(mark_queued(store, "b")).expires_in > 500
        store.release(call("holder"), 1)
        assert not store.unmark(KEY, "a")
        self.nothing_is_left(store)

    def test_a_queued_call_that_waits_in_its_slot_counts_as_queued_for_as_long_again(self, store: Store) -> None:
        mark_queued(store, "a", seconds=60.0)
        granted(store.acquire(call("holder")))
        with store.waiter(call("a", queued_for=600.0)) as waiter:
            queued(waiter.ask())

            assert found(mark_queued(store, "b")).expires_in > 500

    def test_a_refusal_makes_no_mark_shorter_and_none_of_another_call_longer(self, store: Store) -> None:
        mark_queued(store, "a", seconds=600.0)
        granted(store.acquire(call("holder")))
        refused(store.acquire(call("a", queued_for=60.0)))
        refused(store.acquire(call("b", queued_for=6000.0)))

        assert 500 < found(mark_queued(store, "c")).expires_in <= 600

    def test_a_label_stays_with_a_mark_that_lasts_longer(self, store: Store) -> None:
        store.mark_queued(KEY, "a", 60.0, limit=0, quiet=0.0, label="supplier 7")
        granted(store.acquire(call("holder")))
        refused(store.acquire(call("a", queued_for=600.0)))

        assert [mark.label for mark in store.survey([KEY])[0].marks] == ["supplier 7"]

    def test_a_retry_takes_the_mark_over_from_a_call_that_was_queued_meanwhile(self, store: Store) -> None:
        mark_queued(store, "member")

        assert store.mark_queued(KEY, "retry", 60.0, limit=0, quiet=0.0, sent="over") is None
        assert found(mark_queued(store, "another", limit=1)).task_id == "retry"
        assert refused(store.acquire(call("member", heeds_queued=True))).first.task_id == "retry"
        granted(store.acquire(call("retry")))

    def test_what_is_sent_anyway_takes_no_mark_from_another_call(self, store: Store) -> None:
        mark_queued(store, "queued")

        assert found(store.mark_queued(KEY, "member", 60.0, limit=0, quiet=0.0, sent="anyway")).task_id == "queued"
        assert found(mark_queued(store, "another")).task_id == "queued"

    @pytest.mark.parametrize("sent", ["anyway", "over"])
    def test_what_is_sent_in_a_cool_down_counts_as_queued_and_leaves_that_as_it_is(
        self, store: Store, sent: Any
    ) -> None:
        mark_queued(store, "before", quiet=600.0)
        granted(store.acquire(call("before")))
        store.release(call("before"), 1)

        assert store.mark_queued(KEY, "member", 60.0, limit=0, quiet=60.0, sent=sent) is None
        assert found(mark_queued(store, "another")).task_id == "member"
        assert not store.unmark(KEY, "member")
        assert found(mark_queued(store, "another")).task_id == "before"

    def test_the_queued_call_is_queued_no_more_once_it_runs(self, store: Store) -> None:
        mark_queued(store, "a")
        granted(store.acquire(call("a", heeds_queued=True)))

        assert mark_queued(store, "b") is None
        assert found(mark_queued(store, "c", limit=1)).task_id == "b"
        store.unmark(KEY, "b")
        assert found(mark_queued(store, "c", limit=1)).task_id == "a"
        store.release(call("a"), 1)
        assert mark_queued(store, "c", limit=1) is None

    @pytest.mark.parametrize("limit", [1, 2, 3])
    def test_a_call_is_not_queued_while_as_many_run_as_may(self, store: Store, limit: int) -> None:
        for name in "abc"[:limit]:
            assert mark_queued(store, name, limit=limit) is None
            granted(store.acquire(call(name, limit=limit, heeds_queued=True)))

        assert found(mark_queued(store, "next", limit=limit)).task_id in tuple("abc")
        assert mark_queued(store, "next", limit=0) is None, "runs are in nobody's way where they do not count"
        store.unmark(KEY, "next")
        store.release(call("a", limit=limit), 1)
        assert mark_queued(store, "next", limit=limit) is None

    def test_a_call_is_queued_once_the_run_before_it_is_dead(self, store: Store) -> None:
        granted(store.acquire(claim("a", ttl=SHORT, task_id="a")))
        self.let_expire(store)

        assert mark_queued(store, "b", limit=1) is None

    def test_a_queued_call_survives_the_release_of_another_run(self, store: Store) -> None:
        granted(store.acquire(call("a")))
        mark_queued(store, "b")
        store.release(call("a"), 1)

        assert found(mark_queued(store, "c")).task_id == "b"
        assert refused(store.acquire(call("c", heeds_queued=True))).first.task_id == "b"
        granted(store.acquire(call("other")))

    def test_a_retry_of_a_run_does_not_heed_who_is_queued(self, store: Store) -> None:
        # A call with a countdown of ten minutes must not keep a retry out that is due in a second.
        mark_queued(store, "later", seconds=600.0)

        granted(store.acquire(call("retry", heeds_queued=False)))

    @pytest.mark.parametrize("places", [1, 2])
    def test_one_that_waits_in_its_slot_yields_to_no_message(self, store: Store, places: int) -> None:
        # It occupies the slot in which what is queued, or comes next, would have to run.
        granted(store.acquire(call("holder")))
        mark_queued(store, "queued")
        succeed(store, call("next"), "rerun")
        store.release(call("holder"), 1)
        claims = [call(f"w{n}", limit=places, heeds_queued=True) for n in range(places)]

        for mine in claims:
            with store.waiter(mine) as waiter:
                granted(waiter.ask())

        assert successor_of(store) == "next"
        assert found(mark_queued(store, "c")).task_id == "queued"

    def test_one_that_has_waited_for_a_run_yields_to_no_message_either(self, store: Store) -> None:
        granted(store.acquire(call("a")))
        mark_queued(store, "queued")
        with store.waiter(call("w", heeds_queued=True)) as waiter:
            queued(waiter.ask())
            succeed(store, call("next"), "rerun")
            store.release(call("a"), 1)

            granted(waiter.ask())

    def test_a_call_whose_publishing_failed_leaves_nothing(self, store: Store) -> None:
        mark_queued(store, "a", quiet=30)
        assert not store.unmark(KEY, "a")

        self.nothing_is_left(store)
        assert mark_queued(store, "b") is None

    def test_a_call_that_ends_may_leave_its_key_quiet(self, store: Store) -> None:
        mark_queued(store, "a", quiet=30)
        assert not store.unmark(KEY, "a", quiet=False)

        assert found(mark_queued(store, "b")).task_id == "a"
        assert not store.unmark(KEY, "stranger")
        assert found(mark_queued(store, "b")).task_id == "a"
        assert not store.unmark(KEY, "a")
        assert mark_queued(store, "b") is None

    def test_a_key_that_is_quiet_is_published_no_more_though_its_call_has_ended(self, store: Store) -> None:
        mark_queued(store, "a", quiet=30)
        grant = granted(store.acquire(call("a")))
        store.release(call("a"), grant.place)

        assert found(mark_queued(store, "b")).task_id == "a"

    def test_a_key_that_is_quiet_names_who_runs_before_who_was_published(self, store: Store) -> None:
        mark_queued(store, "a", quiet=30)
        store.unmark(KEY, "a", quiet=False)
        granted(store.acquire(call("runs")))

        assert found(mark_queued(store, "b")).task_id == "runs"

    def test_a_mark_outlives_runs_that_are_none_of_its(self, store: Store) -> None:
        # A member of a canvas and a retry are always sent, and run.
        mark_queued(store, "a", quiet=30)
        store.unmark(KEY, "a", quiet=False)
        for name in ("a", "member", "retry"):
            run = claim(name, ttl=SHORT, task_id=name)
            store.release(run, granted(store.acquire(run)).place)

        self.pass_time(2.5 * SHORT)
        assert found(mark_queued(store, "b")).task_id == "a"
        self.pass_time(1 * SHORT)
        assert mark_queued(store, "b") is None

    def test_a_mark_ends_by_itself_if_nobody_comes_for_it(self, store: Store) -> None:
        mark_queued(store, "lost", seconds=SHORT)
        self.pass_time(0.9 * SHORT)
        still = found(mark_queued(store, "b"))
        self.pass_time(0.2 * SHORT)

        assert still.task_id == "lost"
        assert mark_queued(store, "b") is None
        store.unmark(KEY, "b")
        self.nothing_is_left(store)

    def test_a_mark_is_ended_by_its_own_call_only(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        mark_queued(store, "a")
        succeed(store, call("next"), "rerun")
        store.release(call("holder"), 1)

        assert not store.unmark(KEY, "stranger")

        assert found(mark_queued(store, "b")).task_id == "a"
        assert successor_of(store) == "next"
        assert not store.unmark(KEY, "a")
        assert successor_of(store) == "next"
        assert not store.unmark(KEY, "next")
        self.nothing_is_left(store)

    def test_one_that_heeds_a_queued_call_leaves_everything_and_learns_which(self, store: Store) -> None:
        granted(store.acquire(call("holder")))
        mark_queued(store, "queued")
        succeed(store, call("mine"), "rerun")

        conflict = store.unmark(KEY, "mine", heeds=True)

        assert conflict is not None
        assert conflict.first.task_id == "queued"
        assert successor_of(store) == "mine"
        assert store.unmark(KEY, "mine") is None
        assert successor_of(store) is None
        assert store.unmark(KEY, "queued", heeds=True) is None
        store.release(call("holder"), 1)
        self.nothing_is_left(store)

    def test_to_unmark_a_lock_that_nobody_knows_leaves_nothing(self, store: Store) -> None:
        assert not store.unmark(KEY, "a", heeds=True)

        self.nothing_is_left(store)
