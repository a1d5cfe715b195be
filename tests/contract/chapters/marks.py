"""What calls leave in a store that hold nothing: queued, and a cool-down."""

import dataclasses
from typing import Any

import pytest

from celery_singleton_lock.stores.records import Conflict, Marked, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    KEY,
    MEMORY,
    Contract,
    Waiter,
    again,
    begin,
    call,
    found,
    granted,
    mark_newest,
    mark_queued,
    refused,
    succeed,
    succeeding,
    successor_of,
)


class Marks(Contract):
    def test_a_queued_call_that_is_refused_counts_as_queued_for_as_long_again(self, store: Store) -> None:
        mark_queued(store, "a", seconds=60.0)
        granted(store.acquire(call("holder")))
        refused(store.acquire(call("a", heeds_queued=True, queued_for=600.0)))

        assert found(mark_queued(store, "b")).expires_in > 500
        store.release(call("holder"), 1)
        assert not store.unmark(KEY, "a")
        self.nothing_is_left(store)

    def test_a_mark_says_in_which_queue_its_call_is_as_long_as_it_is_queued(self, store: Store) -> None:
        def queue() -> str | None:
            return next(mark.queue for mark in store.survey([KEY])[0].marks if mark.state == "queued")

        mark_queued(store, "a", queue="imports")
        assert queue() == "imports"
        mark_queued(store, "a", queue="imports", label="shop 1", published=5, due_for=3.0)
        assert queue() == "imports"
        granted(store.acquire(call("holder")))
        refused(store.acquire(call("a", heeds_queued=True, queued_for=600.0)))
        assert queue() == "imports"
        assert mark_newest(store, call("b", 7), queue="exports") == Marked()
        assert queue() == "exports"
        assert mark_newest(store, call("c", 9)) == Marked()
        assert queue() is None

    @pytest.mark.parametrize("sent", ["anyway", "over"])
    def test_what_is_sent_in_a_cool_down_counts_as_queued_and_leaves_that_as_it_is(
        self, store: Store, sent: Any
    ) -> None:
        mark_queued(store, "before", cooldown=600.0)
        granted(store.acquire(call("before")))
        store.release(call("before"), 1)

        assert store.mark_queued(KEY, "member", 60.0, limit=0, cooldown=60.0, sent=sent) == Marked()
        assert found(mark_queued(store, "another")).task_id == "member"
        assert not store.unmark(KEY, "member")
        assert found(mark_queued(store, "another")).task_id == "before"

    def test_the_queued_call_is_queued_no_more_once_it_runs(self, store: Store) -> None:
        mark_queued(store, "a")
        granted(store.acquire(call("a", heeds_queued=True)))

        assert mark_queued(store, "b") == Marked()
        assert found(mark_queued(store, "c", limit=1)).task_id == "b"
        store.unmark(KEY, "b")
        assert found(mark_queued(store, "c", limit=1)).task_id == "a"
        store.release(call("a"), 1)
        assert mark_queued(store, "c", limit=1) == Marked()

    @pytest.mark.parametrize("limit", [1, 2, 3])
    def test_a_call_is_not_queued_while_as_many_run_as_may(self, store: Store, limit: int) -> None:
        for name in "abc"[:limit]:
            assert mark_queued(store, name, limit=limit) == Marked()
            granted(store.acquire(call(name, limit=limit, heeds_queued=True)))

        assert found(mark_queued(store, "next", limit=limit)).task_id in tuple("abc")
        assert mark_queued(store, "next", limit=0) == Marked(), "runs are in nobody's way where they do not count"
        store.unmark(KEY, "next")
        store.release(call("a", limit=limit), 1)
        assert mark_queued(store, "next", limit=limit) == Marked()

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_run_whose_call_has_ended_keeps_its_place_and_no_call_from_being_queued(
        self, store: Store, limit: int
    ) -> None:
        holders = [call(name, limit=limit) for name in "ab"[:limit]]
        for each in holders:
            granted(store.acquire(each))
        store.unmark(KEY, "stranger", call_ended=True)
        store.unmark(KEY, "a")
        assert found(mark_queued(store, "next", limit=limit)).task_id in tuple("ab")

        for _ in range(2):
            assert not store.unmark(KEY, "a", ends_cooldown=False, call_ended=True)

        assert mark_queued(store, "next", limit=limit) == Marked()
        assert found(mark_queued(store, "another", limit=limit)).task_id == "next"
        conflict = refused(store.acquire(call("next", limit=limit, heeds_queued=True)))
        assert {each.task_id: each.call_ended for each in conflict.holders} == {
            each.token: each.token == "a" for each in holders
        }
        store.release(holders[0], 1)
        granted(store.acquire(call("next", limit=limit, heeds_queued=True)))
        assert not any(each.call_ended for each in store.holders(KEY))

    def test_the_cool_down_of_a_call_that_had_ended_before_its_run_keeps_others_out(self, store: Store) -> None:
        granted(store.acquire(call("a", min_hold=600.0)))
        store.unmark(KEY, "a", call_ended=True)
        store.release(call("a", min_hold=600.0), 1)

        assert found(mark_queued(store, "next", limit=1)).state == "cooldown"
        assert not refused(store.acquire(call("next"))).first.call_ended

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
        claims = [call(f"w{n}", limit=places) for n in range(places)]

        for mine in claims:
            with Waiter(store, mine) as waiter:
                granted(waiter.ask())

        assert successor_of(store) == "next"
        assert found(mark_queued(store, "c")).task_id == "queued"

    def test_a_call_whose_publishing_failed_leaves_nothing(self, store: Store) -> None:
        mark_queued(store, "a", cooldown=30)
        assert not store.unmark(KEY, "a")

        self.nothing_is_left(store)
        assert mark_queued(store, "b") == Marked()

    def test_a_call_that_ends_may_leave_its_cooldown(self, store: Store) -> None:
        mark_queued(store, "a", cooldown=30)
        assert not store.unmark(KEY, "a", ends_cooldown=False)

        assert found(mark_queued(store, "b")).task_id == "a"
        assert not store.unmark(KEY, "stranger")
        assert found(mark_queued(store, "b")).task_id == "a"
        assert not store.unmark(KEY, "a")
        assert mark_queued(store, "b") == Marked()

    OLDER, NEWER, NEWEST = (
        succeeding(again(call(name, at, heeds_queued=True, queued_for=60.0)), "rerun")
        for name, at in [("older", 1), ("newer", 200), ("newest", 300)]
    )

    def test_the_newest_takes_the_place_of_the_queued_call_and_an_older_one_does_not(self, store: Store) -> None:
        assert mark_newest(store, self.NEWER) == Marked()
        assert found(mark_newest(store, self.OLDER)).task_id == "newer"
        assert mark_newest(store, self.NEWEST) == Marked()
        assert mark_newest(store, self.NEWEST) == Marked(), "a lost reply costs no call"

        assert found(mark_queued(store, "other")).task_id == "newest"
        assert not store.unmark(KEY, "newer"), "its mark is no longer its own"
        assert found(mark_queued(store, "other")).task_id == "newest"
        assert not store.unmark(KEY, "newest")
        self.nothing_is_left(store)

    def test_the_newest_is_due_within_so_many_seconds_after_the_first_whose_place_was_taken(self, store: Store) -> None:
        seconds, more = map(int, store.call("TIME"))
        now = seconds * 1_000_000 + more

        def sooner(name: str, seconds_ago: float, due_in: float = 3.0, within: float = 10.0, **more: Any) -> float:
            published = now - round(seconds_ago * 1_000_000)
            mine = call(name, published / 1_000_000_000)
            answer = mark_newest(store, mine, seconds=600.0, due_in=due_in, within=within, **more)
            assert isinstance(answer, Marked)
            return answer.sooner

        def about(seconds: float) -> Any:
            return pytest.approx(seconds, abs=5.0)

        assert sooner("first", 80) == 0.0, "it has taken nobody's place"
        assert sooner("second", 50, within=100.0) == 0.0, "it is due in time"
        assert sooner("third", 40, due_in=50.0, within=100.0) == about(30.0)
        assert sooner("third", 40, due_in=50.0, within=100.0) == about(30.0), "a lost reply changes nothing"
        assert 560.0 < found(mark_queued(store, "other")).expires_in < 575.0, "its mark ends sooner by that, too"
        assert sooner("fourth", 10, due_in=50.0, within=60.0) == about(50.0), "at once"
        assert sooner("expires", 9, due_in=50.0, within=60.0, due_for=20.0) == about(50.0)
        assert found(mark_queued(store, "other")).expires_in > 595.0, "its mark ends when the call expires"
        assert not store.unmark(KEY, "expires")
        assert sooner("fifth", 5) == 0.0, "the row of calls has ended"
        assert not store.unmark(KEY, "fifth")
        self.nothing_is_left(store)

    def test_an_older_call_ends_in_favour_of_the_queued_one_and_of_that_once_it_has_ended(self, store: Store) -> None:
        for each in (self.OLDER, self.NEWER, self.NEWEST, self.NEWEST):
            assert mark_newest(store, each) == Marked(), "also if a reply is lost"

        assert refused(store.acquire(self.OLDER)).successor == "newest"
        store.release(self.NEWEST, granted(store.acquire(self.NEWEST)).place)
        assert refused(store.acquire(self.NEWER)).successor == "newest"
        granted(store.acquire(call("new", 4, heeds_queued=True)))

    def test_likewise_where_a_body_begins_without_a_lease(self, store: Store) -> None:
        for each in (self.OLDER, self.NEWER, self.NEWEST):
            assert mark_newest(store, each) == Marked()

        assert refused_by(begin(store, self.OLDER)) == "newest"
        assert begin(store, self.NEWEST) is None
        assert begin(store, self.NEWEST) is None, "a copy of it is no older call"
        assert refused_by(begin(store, self.NEWER)) == "newest"
        # One that was sent without a mark is the newest as it comes.
        assert begin(store, call("sent", succeeds="rerun", supersedes_for=MEMORY)) is None

    def test_one_that_comes_without_a_mark_and_is_newer_goes_before_the_queued_one(self, store: Store) -> None:
        assert mark_newest(store, self.OLDER) == Marked()

        assert begin(store, self.NEWER) is None
        assert refused_by(begin(store, self.OLDER)) == "newer"

    def test_a_run_that_was_sent_without_a_mark_supersedes_no_call_that_has_yet_to_ask(self, store: Store) -> None:
        # Nothing tells when it was published, so it is as old as its grant.
        granted(store.acquire(call("sent")))
        mark_newest(store, self.OLDER)

        early = dataclasses.replace(self.OLDER, newest="queued")
        assert refused(store.acquire(early)).successor == "older"

    def test_what_is_kept_of_the_newest_ends_with_the_older_messages(self, store: Store) -> None:
        mark_newest(store, self.OLDER, seconds=2 * MEMORY)
        mark_newest(store, self.NEWER)
        store.release(self.NEWER, granted(store.acquire(self.NEWER)).place)

        self.pass_time(MEMORY + 60.0)
        assert refused(store.acquire(self.OLDER)).successor == "newer"
        self.pass_time(MEMORY)
        granted(store.acquire(self.OLDER))

    def test_the_cool_down_of_a_queued_call_does_not_keep_the_newest_out_and_that_of_a_run_does(
        self, store: Store
    ) -> None:
        mark_newest(store, self.OLDER, cooldown=600.0)
        assert mark_newest(store, self.NEWER, cooldown=600.0) == Marked()
        assert not store.unmark(KEY, "older")
        store.release(self.NEWER, granted(store.acquire(self.NEWER)).place)

        assert found(mark_newest(store, self.NEWEST)).task_id == "newer"

    def test_a_holder_is_asked_to_stop_only_once_the_queued_call_has_come_again(self, store: Store) -> None:
        granted(store.acquire(call("holder", 1)))
        newer = dataclasses.replace(self.NEWER, succeeds="replace")
        mark_newest(store, newer)

        for _ in range(2):
            assert refused(store.acquire(dataclasses.replace(newer, newest="queued"))).successor == "newer"
            assert store.renew([call("holder", 1)], 1.0) == [Renewal.RENEWED]
        assert refused(store.acquire(newer)).successor == "newer"
        assert store.renew([call("holder", 1)], 1.0) == [Renewal.REPLACED]


def refused_by(conflict: Conflict | None) -> str | None:
    assert conflict is not None
    return conflict.successor
