"""Which call runs next: with `rerun` and `replace` it is the newest, and older ones end in its favour."""

from dataclasses import replace

import pytest

from celery_singleton_lock.stores.records import RELEASED, Renewal
from celery_singleton_lock.stores.records import Succession as Rule
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    KEY,
    MEMORY,
    PATIENCE,
    Contract,
    again,
    call,
    granted,
    mark_queued,
    refused,
    succeed,
    succeeding,
    successor_of,
    tokens,
)
from tests.contract.chapters.turns import listening, turn_of
from tests.waiting import until

either = pytest.mark.parametrize("rule", ["rerun", "replace"])


class Succession(Contract):
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
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), rule)
        succeed(store, call("c", 3000), rule)
        store.release(call("a"), 1)
        newer = granted(store.acquire(succeeding(again(call("c", 3000)), rule)))

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
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), rule)
        succeed(store, call("c", 3000), rule)
        store.release(call("a"), 1)
        granted(store.acquire(succeeding(again(call("c", 3000)), rule)))
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
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), rule)
        succeed(store, call("c", 3000), rule)
        store.release(call("a"), 1)
        granted(store.acquire(succeeding(again(call("c", 3000)), rule)))
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
            labelled = replace(mine, facts=replace(mine.facts, label=label))
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
        assert (store.replaced_by(call("a")), store.replaced_by(call("d"))) == ("c", None)
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
