"""What calls leave that holds nothing: queued, a cool-down, and next: the newest, in whose favour older ones end."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock.stores.records import RELEASED, Grant, Marked, Renewal
from celery_singleton_lock.stores.records import Succession as Rule
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    KEY,
    MEMORY,
    PATIENCE,
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
    tokens,
)
from tests.contract.chapters.turns import listening, turn_of
from tests.waiting import until


class Marks(Contract):
    @pytest.mark.parametrize("seconds", [60.0, 6000.0])
    def test_a_queued_call_that_is_refused_counts_as_queued_for_at_least_as_long_again(
        self, store: Store, seconds: float
    ) -> None:
        mark_queued(store, "a", seconds=seconds)
        granted(store.acquire(call("holder")))
        refused(store.acquire(call("a", heeds_queued=True, queued_for=600.0)))

        assert found(mark_queued(store, "b")).expires_in > max(500.0, seconds - 100)
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

    def test_a_call_that_ends_may_leave_its_cooldown(self, store: Store) -> None:
        mark_queued(store, "a", cooldown=30)
        assert not store.unmark(KEY, "a", ends_cooldown=False)

        assert found(mark_queued(store, "b")).task_id == "a"
        assert not store.unmark(KEY, "stranger")
        assert found(mark_queued(store, "b")).task_id == "a"
        assert not store.unmark(KEY, "a")
        self.nothing_is_left(store)
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

        assert begin(store, self.OLDER).successor == "newest"
        assert begin(store, self.NEWEST) is None
        assert begin(store, self.NEWEST) is None, "a copy of it is no older call"
        assert begin(store, self.NEWER).successor == "newest"
        # One that was sent without a mark is the newest as it comes.
        assert begin(store, call("sent", succeeds="rerun", supersedes_for=MEMORY)) is None

    def test_one_that_comes_without_a_mark_and_is_newer_goes_before_the_queued_one(self, store: Store) -> None:
        assert mark_newest(store, self.OLDER) == Marked()

        assert begin(store, self.NEWER) is None
        assert begin(store, self.OLDER).successor == "newer"

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


either = pytest.mark.parametrize("rule", ["rerun", "replace"])


class Succession(Contract):
    def c_runs_in_favour_of_which_b_ends(self, store: Store, rule: Rule) -> Grant:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), rule)
        succeed(store, call("c", 3000), rule)
        store.release(call("a"), 1)
        return granted(store.acquire(succeeding(again(call("c", 3000)), rule)))

    @either
    def test_the_last_who_was_published_is_next(self, store: Store, rule: Rule) -> None:
        granted(store.acquire(call("a", 1000)))
        assert succeed(store, call("b", 2000), rule) == "b"
        assert succeed(store, call("c", 3000), rule) == "c"

        assert succeed(store, again(call("b", 2000)), rule) == "c"
        assert succeed(store, call("old", 2500), rule) == "c"
        store.release(call("a"), 1)
        conflict = refused(store.acquire(succeeding(again(call("b", 2000)), rule)))
        assert (conflict.successor, conflict.first.task_id) == ("c", "c")
        granted(store.acquire(succeeding(again(call("c", 3000)), rule)))

    @either
    def test_an_older_call_that_has_asked_ends_in_favour_of_the_newer_run(self, store: Store, rule: Rule) -> None:
        newer = self.c_runs_in_favour_of_which_b_ends(store, rule)

        assert succeed(store, again(call("b", 2000)), rule) == "c"
        store.release(call("c"), newer.place)

        conflict = refused(store.acquire(succeeding(again(call("b", 2000)), rule)))
        assert (conflict.successor, conflict.first.task_id) == ("c", "c")
        assert conflict.first.expires_in == 0.0
        assert successor_of(store) is None
        self.pass_time(MEMORY - 100)
        assert succeed(store, again(call("b", 2000)), rule) == "c"
        self.pass_time(200)
        granted(store.acquire(succeeding(again(call("b", 2000)), rule)))

    @either
    def test_an_older_call_ends_though_several_newer_ones_have_run_before_it_is_back(
        self, store: Store, rule: Rule
    ) -> None:
        self.c_runs_in_favour_of_which_b_ends(store, rule)
        succeed(store, call("d", 4000), rule)
        store.release(call("c"), 1)
        granted(store.acquire(succeeding(again(call("d", 4000)), rule)))
        store.release(call("d"), 1)

        assert succeed(store, again(call("b", 2000)), rule) == "d"

    @either
    def test_an_older_call_ends_though_the_newest_never_came(self, store: Store, rule: Rule) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), rule)
        succeed(store, call("d", 4000), rule)
        for _ in range(2):
            self.pass_time(0.6 * PATIENCE)
            store.renew([call("a", 1000)], 1.0)
        assert succeed(store, again(call("c", 3000)), rule) == "c"
        store.release(call("a"), 1)
        granted(store.acquire(succeeding(again(call("c", 3000)), rule)))
        store.release(call("c"), 1)

        assert succeed(store, again(call("b", 2000)), rule) == "c"

    @either
    def test_a_late_call_that_runs_after_newer_ones_does_not_hide_them(self, store: Store, rule: Rule) -> None:
        self.c_runs_in_favour_of_which_b_ends(store, rule)
        store.release(call("c"), 1)

        granted(store.acquire(succeeding(call("late", 1500), rule)))
        store.release(call("late"), 1)

        assert succeed(store, again(call("b", 2000)), rule) == "c"

    @either
    def test_a_place_is_kept_for_the_next_for_so_long_and_not_longer(self, store: Store, rule: Rule) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), rule)
        store.release(call("a"), 1)

        self.pass_time(PATIENCE - 1)
        refused(store.acquire(call("c", 3000)))
        self.pass_time(2)

        granted(store.acquire(call("c", 3000)))

    def test_a_rerun_asks_no_holder_to_make_way(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        for _ in range(2):
            assert succeed(store, again(call("b", 2000)), "rerun") == "b"

        assert store.renew([call("a")], 1.0) == [Renewal.RENEWED]

    def test_the_next_of_another_task_supersedes_nobody(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        assert succeed(store, call("other", 2000), "rerun", "shop.other") == "other"

        for published in (1500, 3000):
            mine = again(call("mine", published))
            assert succeed(store, mine, "rerun") is None, "it is requeued, and takes the mark then"
        assert successor_of(store) == "other"

        store.release(call("a"), 1)
        granted(store.acquire(succeeding(again(call("other", 2000)), "rerun", "shop.other")))
        assert succeed(store, again(call("mine", 1500)), "rerun") == "mine"

    def test_a_successor_is_known_by_its_task_whatever_its_label(self, store: Store) -> None:
        granted(store.acquire(call("a")))
        for mine, label in ((call("b", 3000), "supplier 7"), (call("c", 2000), "another")):
            labelled = replace(mine, label=label)
            assert succeed(store, labelled, "rerun", "shop.other") == "b"

        assert succeed(store, call("d", 2000), "rerun") is None

    def test_an_older_call_ends_in_favour_of_a_newer_run_that_the_successor_of_another_task_hides(
        self, store: Store
    ) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("old", 2000), "rerun")
        store.release(call("a"), 1)
        self.pass_time(PATIENCE + 1)
        granted(store.acquire(succeeding(call("new", 3000), "rerun")))
        assert succeed(store, call("other", 4000), "rerun", "shop.other") == "other"
        for _ in range(2):
            self.pass_time(0.6 * PATIENCE)
            store.renew([call("new")], 1.0)

        assert succeed(store, again(call("old", 2000)), "rerun") == "new"

    def test_a_holder_that_is_replaced_hears_of_it_and_holds_until_it_lets_go(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, again(call("b", 2000)), "replace")

        assert store.renew([call("a")], 1.0) == [Renewal.REPLACED]
        assert tokens(store.holders(KEY)) == ["a"]
        assert store.holders(KEY)[0].expires_in > 25
        assert granted(store.acquire(call("a", 1000))).place == 1
        assert successor_of(store) == "b"
        assert refused(store.acquire(succeeding(again(call("b", 2000)), "replace"))).first.token == "a"
        assert store.release(call("a"), 1) == RELEASED
        granted(store.acquire(succeeding(again(call("b", 2000)), "replace")))
        assert store.renew([call("b")], 1.0) == [Renewal.RENEWED]
        assert successor_of(store) is None

    def test_a_holder_stays_if_its_successor_gets_another_place(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000, limit=2)))
        granted(store.acquire(call("b", 1500, limit=2)))
        succeed(store, again(call("c", 2000, limit=2)), "replace")
        store.release(call("b", 1500), 2)

        granted(store.acquire(again(call("c", 2000, limit=2))))

        assert store.renew([call("a"), call("c")], 1.0) == [Renewal.RENEWED, Renewal.RENEWED]
        assert tokens(store.holders(KEY)) == ["a", "c"]
        # It may have heard of the request before.
        store.release(call("c"), 2)
        granted(store.acquire(call("d", 3000, limit=2)))
        assert (store.asked_to_stop_by(call("a"), "replaced"), store.asked_to_stop_by(call("d"), "replaced")) == (
            "c",
            None,
        )
        store.release(call("a"), 1)
        store.release(call("d"), 2)
        self.nothing_is_left(store)

    def test_an_older_call_replaces_neither_a_newer_run_nor_its_successor(self, store: Store) -> None:
        granted(store.acquire(call("a", 2000)))

        assert succeed(store, again(call("retry", 1000)), "replace") == "a"
        assert store.renew([call("a")], 1.0) == [Renewal.RENEWED]
        assert successor_of(store) is None
        succeed(store, call("b", 3000), "replace")
        assert succeed(store, again(call("retry", 2500)), "replace") == "b"
        assert successor_of(store) == "b"

    def test_an_older_call_does_not_replace_a_newer_successor_that_reruns(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("rerun", 3000), "rerun", "shop.other")

        assert succeed(store, again(call("mine", 2000)), "replace") == "rerun"

    def test_the_oldest_holder_is_asked_whichever_place_it_has(self, store: Store) -> None:
        for name in "xy":
            granted(store.acquire(call(name, 1000, limit=2)))
        store.release(call("x"), 1)
        granted(store.acquire(call("z", 1500, limit=2)))

        succeed(store, again(call("b", 2000, limit=2)), "replace")

        assert store.renew([call(name) for name in "yz"], 1.0) == [Renewal.REPLACED, Renewal.RENEWED]

    def test_the_queued_call_does_not_wait_for_a_successor_that_waits_for_it(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("next", 2000), "rerun")
        mark_queued(store, "queued")
        store.release(call("a"), 1)

        refused(store.acquire(succeeding(again(call("next", 2000, heeds_queued=True)), "rerun")))
        granted(store.acquire(call("queued", 3000)))

    @either
    def test_of_several_free_places_one_is_kept_for_the_next(self, store: Store, rule: Rule) -> None:
        for name in "xy":
            granted(store.acquire(call(name, 1000, limit=2)))
        assert succeed(store, call("b", 2000, limit=2), rule) == "b"
        for place in (1, 2):
            store.release(call("xy"[place - 1]), place)

        granted(store.acquire(call("one", 5000, limit=2)))
        assert refused(store.acquire(call("two", 5000, limit=2))).holders[0].token == "one"
        granted(store.acquire(succeeding(again(call("b", 2000, limit=2)), rule)))

    def test_a_holder_stays_if_the_successor_that_has_asked_it_to_make_way_ends(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, again(call("b", 2000)), "replace")
        assert store.renew([call("a")], 1.0) == [Renewal.REPLACED]

        store.unmark(KEY, "b")

        assert store.renew([call("a")], 1.0) == [Renewal.RENEWED]
        store.release(call("a"), 1)
        self.nothing_is_left(store)

    def test_a_holder_that_a_person_has_asked_to_stop_stays_asked_when_a_successor_ends(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, again(call("b", 2000)), "replace")
        Inventory(store).break_lock(KEY, ["a"], "somebody")

        store.unmark(KEY, "b")

        assert store.renew([call("a")], 1.0) == [Renewal.BROKEN]

    def test_a_successor_that_ends_calls_the_next_in_line(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        store.release(call("a"), 1)
        turn_of(store, "waits")
        with listening(store, "waits") as heard:
            store.unmark(KEY, "b")

            until(lambda: "free" in heard["waits"], "it is called")
