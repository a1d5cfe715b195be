"""Which call runs next: `rerun` merges, `replace` lets the newest win."""

import dataclasses
from typing import Any

import pytest

from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Answer, Claim, Turn
from celery_singleton_lock.stores.records import Succession as Rule
from tests.contract.asking import (
    ENDED,
    KEY,
    MEMORY,
    PATIENCE,
    TASK,
    Contract,
    again,
    call,
    claim,
    granted,
    mark_queued,
    refused,
    succeed,
    tokens,
)

MINE = (Turn.MINE, None)


def merged_into(name: str) -> tuple[Turn, str]:
    return Turn.MERGED, name


class Succession(Contract):
    """Calls that run after the present one, or in its place."""

    # Rerun.

    def test_the_first_who_wants_a_rerun_is_next_and_runs_with_the_newest_arguments(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        assert succeed(store, call("b", 2000), "rerun", "of b") == MINE
        assert succeed(store, call("c", 3000), "rerun", "of c") == merged_into("b")
        assert succeed(store, call("d", 4000), "rerun", "of d") == merged_into("b")
        store.release(call("a"), 1)

        assert refused(store.acquire(call("stranger", 5000))).first.task_id == "b"
        mine = again(call("b", 2000), merges=TASK)
        assert granted(store.acquire(mine)).arguments == "of d"
        assert granted(store.acquire(mine)).arguments == "of d", "a lost reply costs no arguments"
        store.release(mine, 1, ending=ENDED)
        self.nothing_is_left(store)

    def test_the_queued_call_and_a_successor_do_not_wait_for_each_other(self, store: Store) -> None:
        mark_queued(store, "q")
        first = call("s", 2000, heeds_queued=True)
        assert refused(store.acquire(first)).first.task_id == "q"
        assert succeed(store, first, "rerun") == MINE

        retry = call("q", 1000)
        granted(store.acquire(retry))
        store.release(retry, 1)
        granted(store.acquire(again(first)))

    @pytest.mark.parametrize("published", [1000, 3000])
    def test_a_queued_call_that_wants_a_rerun_is_merged_with_the_successor(
        self, store: Store, published: float
    ) -> None:
        mark_queued(store, "q")
        succeed(store, call("s", 2000), "rerun")
        queued_call = call("q", published, heeds_queued=True, succeeds="rerun", merges=TASK)

        assert refused(store.acquire(queued_call)).first.task_id == "s"
        assert succeed(store, queued_call, "rerun", "of q") == merged_into("s")

        store.unmark(KEY, "q")
        mine = again(call("s", 2000, heeds_queued=True, succeeds="rerun", merges=TASK))
        assert granted(store.acquire(mine)).arguments == ("of q" if published > 2000 else "")

    @pytest.mark.parametrize(("task_name", "policy"), [("shop.tasks.other", "rerun"), (TASK, "replace")])
    def test_a_queued_call_that_cannot_be_merged_does_not_wait_for_the_successor(
        self, store: Store, task_name: str, policy: Rule
    ) -> None:
        mark_queued(store, "q")
        succeed(store, call("s", 2000), policy, task_name=task_name)

        granted(store.acquire(call("q", 1000, heeds_queued=True, succeeds="rerun", merges=TASK)))

    @pytest.mark.parametrize("policy", ["rerun", "replace"])
    def test_an_older_queued_call_that_replaces_ends_for_a_newer_successor(self, store: Store, policy: Rule) -> None:
        mark_queued(store, "q")
        succeed(store, call("s", 2000), policy)
        queued_call = call("q", 1000, heeds_queued=True, succeeds="replace", merges=TASK)

        assert refused(store.acquire(queued_call)).first.task_id == "s"
        assert succeed(store, queued_call, "replace") == merged_into("s")

        store.unmark(KEY, "q")
        granted(store.acquire(again(call("s", 2000, heeds_queued=True, succeeds="replace", merges=TASK))))

    @pytest.mark.parametrize("published", [0, 3000])
    def test_a_newer_queued_call_that_replaces_goes_before_the_successor(self, store: Store, published: float) -> None:
        mark_queued(store, "q")
        succeed(store, call("s", 2000), "replace")
        granted(store.acquire(call("q", published, heeds_queued=True, succeeds="replace", merges=TASK)))

        late = again(call("s", 2000, heeds_queued=True, succeeds="replace", merges=TASK))
        assert refused(store.acquire(late)).first.task_id == "q"
        assert succeed(store, late, "replace") == merged_into("q")

    def test_a_queued_call_takes_a_place_that_its_successor_does_not_need(self, store: Store) -> None:
        mark_queued(store, "q")
        succeed(store, call("s", 2000), "replace")

        granted(store.acquire(call("q", 1000, limit=2, heeds_queued=True, succeeds="replace")))

    def carrying(self, store: Store, **more: Any) -> Claim:
        """A run of `b`, delivered for the first time, with the arguments of `c`."""
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        succeed(store, call("c", 3000), "rerun", "of c")
        store.release(call("a"), 1)
        run = dataclasses.replace(again(call("b", 2000), merges=TASK, **more), token="run-1")
        assert granted(store.acquire(run)).arguments == "of c"
        return run

    def test_merged_arguments_outlive_a_run_that_dies_with_them(self, store: Store) -> None:
        self.carrying(store)
        self.pass_time(31)

        delivered_again = dataclasses.replace(call("b", 2000, merges=TASK), token="run-2")
        grant = granted(store.acquire(delivered_again))
        assert grant.took_over
        assert grant.arguments == "of c"
        store.release(delivered_again, 1, ending=ENDED)
        self.nothing_is_left(store)

    def test_merged_arguments_are_remembered_from_the_moment_at_which_they_were_taken(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        succeed(store, call("c", 3000), "rerun", "of c")
        store.release(call("a"), 1)
        self.pass_time(MEMORY - 100)
        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == "of c"

        self.pass_time(MEMORY - 100)

        delivered_again = dataclasses.replace(call("b", 2000, merges=TASK), token="run-2")
        assert granted(store.acquire(delivered_again)).arguments == "of c"

    @pytest.mark.parametrize("min_hold", [0.0, 40.0])
    def test_a_run_that_has_not_ended_for_good_leaves_merged_arguments_to_the_next(
        self, store: Store, min_hold: float
    ) -> None:
        run = self.carrying(store, min_hold=min_hold)
        store.release(run, None)
        self.pass_time(min_hold + 1)

        delivered_again = dataclasses.replace(call("b", 2000, merges=TASK), token="run-2")
        assert granted(store.acquire(delivered_again)).arguments == "of c"

    @pytest.mark.parametrize("min_hold", [0.0, 40.0])
    def test_a_run_that_has_ended_for_good_takes_its_merged_arguments_with_it(
        self, store: Store, min_hold: float
    ) -> None:
        store.release(self.carrying(store, min_hold=min_hold), 1, ending=ENDED)
        self.pass_time(min_hold + 1)

        assert granted(store.acquire(call("late", 500, merges=TASK))).arguments == ""

    @pytest.mark.parametrize("makes_way", [False, True])
    def test_arguments_are_not_taken_from_a_run_that_lives(self, store: Store, makes_way: bool) -> None:
        run = self.carrying(store)
        if makes_way:
            succeed(store, again(call("newest", 9000)), "replace")
            store.unmark(KEY, "newest")

        beside = dataclasses.replace(call("beside", 500, merges=TASK), limit=2)
        assert granted(store.acquire(beside)).arguments == ""
        assert granted(store.acquire(run)).arguments == "of c"

    def test_newer_arguments_go_to_the_next_run_and_not_to_the_one_that_lives(self, store: Store) -> None:
        run = self.carrying(store)
        assert succeed(store, call("d", 4000), "rerun") == MINE
        assert succeed(store, call("e", 5000), "rerun", "of e") == merged_into("d")

        assert granted(store.acquire(run)).arguments == ""
        store.release(run, 1, ending=ENDED)
        assert granted(store.acquire(again(call("d", 4000), merges=TASK))).arguments == "of e"

    def test_a_successor_may_end_if_others_were_merged_into_the_run_before_it(self, store: Store) -> None:
        self.carrying(store)
        assert succeed(store, call("d", 4000), "rerun") == MINE

        assert store.unmark(KEY, "d", unless=("merged",))

    def test_a_late_successor_runs_after_an_older_call_with_newer_arguments(self, store: Store) -> None:
        self.carrying(store)

        assert succeed(store, again(call("late", 1500)), "rerun") == merged_into("b")
        assert succeed(store, again(call("between", 2500)), "rerun") == MINE

    def test_arguments_are_asked_for_only_where_they_are_needed(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        assert succeed(store, call("b", 2000), "rerun") == MINE, "the successor has its own with it"

        assert succeed(store, call("c", 3000), "rerun") is None
        assert succeed(store, call("c", 3000), "rerun", "of c") == merged_into("b")
        assert succeed(store, call("old", 2500), "rerun") == merged_into("b")
        assert succeed(store, call("older", 1500), "rerun") == merged_into("b")

    def test_the_newest_arguments_are_those_that_were_published_last(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        for name, published in [("c", 4000), ("d", 3000)]:
            assert succeed(store, call(name, published), "rerun", f"of {name}") == merged_into("b")
        store.release(call("a"), 1)

        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == "of c"

    def test_a_retry_that_comes_later_merges_no_older_arguments_into_a_newer_call(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")

        assert succeed(store, call("retry", 1500), "rerun", "old") == merged_into("b")

        store.release(call("a"), 1)
        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == ""

    def test_merged_arguments_are_for_the_next_run_of_that_task_only(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        succeed(store, call("c", 3000), "rerun", "of c")
        store.release(call("a"), 1)
        self.pass_time(PATIENCE + 1)

        for name, merges in [("other", "shop.tasks.other"), ("no-task", "")]:
            assert granted(store.acquire(call(name, 2500, merges=merges))).arguments == ""
            store.release(call(name), 1)
        assert granted(store.acquire(call("any", 2500, merges=TASK))).arguments == "of c"

    def test_calls_of_another_task_are_not_merged(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")

        assert succeed(store, call("c", 3000), "rerun", "of c", task_name="shop.tasks.other") == (Turn.OTHER_TASK, None)

        store.release(call("a"), 1)
        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == ""

    def test_calls_are_merged_only_into_one_that_has_asked_for_a_rerun(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")

        assert succeed(store, call("c", 3000), "rerun", "of c") == (Turn.OTHER_TASK, None)

        store.release(call("a"), 1)
        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == ""

    def test_one_that_was_replaced_learns_of_it_though_it_asks_for_a_rerun_now(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        succeed(store, call("c", 3000), "replace")
        store.release(call("a"), 1)
        store.release(call("c"), granted(store.acquire(again(call("c", 3000)))).place)

        assert succeed(store, again(call("b", 2000)), "rerun", "of b") == merged_into("c")

    @pytest.mark.parametrize("late", [0.0, PATIENCE + 1, MEMORY - 100])
    def test_merged_arguments_outlive_the_patience_with_the_successor(self, store: Store, late: float) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        succeed(store, call("c", 3000), "rerun", "of c")
        store.release(call("a"), 1)

        self.pass_time(late)

        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == "of c"

    def test_a_run_with_newer_arguments_keeps_them_and_ends_what_was_merged(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        succeed(store, call("c", 3000), "rerun", "of c")
        store.release(call("a"), 1)
        self.pass_time(PATIENCE + 1)

        assert granted(store.acquire(call("d", 4000, merges=TASK))).arguments == ""
        store.release(call("d"), 1)
        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == ""

    def test_a_run_whose_publication_nobody_knows_takes_what_was_merged(self, store: Store) -> None:
        granted(store.acquire(call("a")))
        assert succeed(store, call("b"), "rerun") == MINE
        assert succeed(store, call("c"), "rerun", "of c") == merged_into("b")
        store.release(call("a"), 1)

        assert granted(store.acquire(again(call("b"), merges=TASK))).arguments == "of c"

    def test_a_successor_that_asks_again_keeps_what_others_left(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        succeed(store, call("c", 3000), "rerun", "of c")

        assert refused(store.acquire(again(call("b", 2000)))).successor == "b"
        assert succeed(store, again(call("b", 2000)), "rerun") == MINE
        store.release(call("a"), 1)

        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == "of c"

    def test_a_successor_with_which_others_were_merged_cannot_just_end(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        succeed(store, call("c", 3000), "rerun", "of c")

        assert not store.unmark(KEY, "b", unless=("merged",))
        assert store.successor(KEY) == "b"
        self.pass_time(PATIENCE + 1)
        assert not store.unmark(KEY, "b", unless=("merged",)), "nor when its time as the successor is over"
        assert store.unmark(KEY, "c", unless=("merged",))
        assert store.unmark(KEY, "b")
        assert store.successor(KEY) is None

    def test_nor_one_that_an_older_call_was_merged_with(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        assert succeed(store, call("old", 1500), "rerun") == merged_into("b")

        assert not store.unmark(KEY, "b", unless=("merged",))

        store.release(call("a"), 1)
        mine = again(call("b", 2000), merges=TASK)
        granted(store.acquire(mine))
        store.release(mine, 1, ending=ENDED)
        self.nothing_is_left(store)

    def test_nor_one_in_whose_favour_an_older_call_that_replaces_has_ended(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        assert succeed(store, call("old", 1500), "replace") == merged_into("b")

        assert not store.unmark(KEY, "b", unless=("merged",))
        self.pass_time(PATIENCE + 1)
        assert not store.unmark(KEY, "b", unless=("merged",)), "nor when its time as the successor is over"

        store.release(call("a"), 1)
        store.release(call("b"), granted(store.acquire(again(call("b", 2000)))).place)
        self.nothing_is_left(store)

    def test_nor_one_that_has_overtaken_a_successor(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        assert store.unmark(KEY, "b", unless=("merged",)), "nobody ends in its favour"
        succeed(store, call("b", 2000), "replace")
        succeed(store, call("c", 3000), "replace")
        assert not store.unmark(KEY, "c", unless=("merged",)), "before the older one has heard of it"
        assert succeed(store, again(call("b", 2000)), "replace") == merged_into("c")
        store.unmark(KEY, "b")

        assert not store.unmark(KEY, "c", unless=("merged",))
        assert store.successor(KEY) == "c"

        store.release(call("a"), 1)
        store.release(call("c"), granted(store.acquire(again(call("c", 3000)))).place)
        self.nothing_is_left(store)

    def test_nor_the_last_of_several_that_have_overtaken_each_other(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        for name, published in [("b", 2000), ("c", 3000), ("d", 4000)]:
            assert succeed(store, call(name, published), "replace") == MINE
        for name, published, newer in [("b", 2000, "c"), ("c", 3000, "d")]:
            assert succeed(store, again(call(name, published)), "replace") == merged_into(newer)
            store.unmark(KEY, name)

        assert not store.unmark(KEY, "d", unless=("merged",))

        store.release(call("a"), 1)
        store.release(call("d"), granted(store.acquire(again(call("d", 4000)))).place)
        self.nothing_is_left(store)

    def test_a_holder_stays_if_the_successor_that_has_asked_it_to_make_way_ends(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        succeed(store, again(call("b", 2000)), "replace")

        store.unmark(KEY, "b")

        assert store.renew([call("a")], 1.0) == [Answer.DONE]
        store.release(call("a"), 1)
        self.nothing_is_left(store)

    def test_a_successor_for_which_a_holder_ends_cannot_just_end(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        succeed(store, again(call("b", 2000)), "replace")
        store.renew([call("a")], 1.0)

        assert not store.unmark(KEY, "b", unless=("heard",))
        assert store.successor(KEY) == "b"
        assert store.renew([call("a")], 1.0) == [Answer.REPLACED]
        assert store.unmark(KEY, "stranger", unless=("heard",))
        assert store.unmark(KEY, "b", unless=("merged",))
        assert store.renew([call("a")], 1.0) == [Answer.DONE]

    def test_one_that_no_holder_has_heard_of_may_end(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        for _ in range(2):
            succeed(store, again(call("b", 2000)), "replace")
        granted(store.acquire(call("a", 1000)))

        assert store.unmark(KEY, "b", unless=("heard",))
        assert store.renew([call("a")], 1.0) == [Answer.DONE]

    def test_nor_does_it_forget_that_a_holder_has_heard(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, again(call("b", 2000)), "replace")
        store.renew([call("a")], 1.0)
        succeed(store, again(call("b", 2000)), "replace")

        assert not store.unmark(KEY, "b", unless=("heard",))

    def test_but_not_if_another_one_comes_next(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        succeed(store, again(call("b", 2000)), "replace")
        succeed(store, call("c", 3000), "replace")

        store.unmark(KEY, "b")

        assert store.renew([call("a")], 1.0) == [Answer.REPLACED]

    def test_a_rerun_comes_after_a_newer_call_of_another_task_that_replaces(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        succeed(store, call("c", 3000), "rerun", "of c")
        assert succeed(store, call("p", 4000), "replace", task_name="shop.tasks.other") == MINE
        assert refused(store.acquire(again(call("b", 2000), merges=TASK))).successor == "p"
        assert succeed(store, again(call("b", 2000)), "rerun") == (Turn.OTHER_TASK, None)
        assert not store.unmark(KEY, "b", unless=("merged",)), "those that were merged still wait for it"
        store.release(call("a"), 1)
        other = again(call("p", 4000))
        other.facts.task_name = "shop.tasks.other"
        granted(store.acquire(other))
        assert succeed(store, again(call("b", 2000)), "rerun") == MINE
        store.release(other, 1)

        assert granted(store.acquire(again(call("b", 2000), merges=TASK))).arguments == "of c"

    def test_a_successor_with_which_nobody_was_merged_may_end(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")

        assert store.unmark(KEY, "b", unless=("merged",))

        assert store.successor(KEY) is None
        store.release(call("a"), 1)
        self.nothing_is_left(store)

    def test_a_place_is_kept_for_a_successor_for_so_long_and_not_longer(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        store.release(call("a"), 1)

        self.pass_time(PATIENCE - 1)
        refused(store.acquire(call("c", 3000)))
        self.pass_time(2)

        granted(store.acquire(call("c", 3000)))

    def test_a_successor_that_was_given_up_gives_way_to_a_newer_run(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        self.pass_time(PATIENCE + 1)
        store.release(call("a"), 1)
        granted(store.acquire(call("newer", 3000)))

        assert succeed(store, again(call("b", 2000)), "rerun") == merged_into("newer")

    @pytest.mark.parametrize("policy", ["rerun", "replace"])
    def test_no_call_ends_in_favour_of_a_lock_that_was_taken_later(self, store: Store, policy: Rule) -> None:
        # It has no task id, and does not do the work of the call.
        granted(store.acquire(claim("lock")))

        assert succeed(store, again(call("b", 2000)), policy) == MINE

    @pytest.mark.parametrize("policy", ["rerun", "replace"])
    def test_but_in_favour_of_a_newer_one_behind_it(self, store: Store, policy: Rule) -> None:
        granted(store.acquire(claim("lock", limit=2)))
        granted(store.acquire(call("newer", 3000, limit=2)))

        assert succeed(store, again(call("b", 2000)), policy) == merged_into("newer")

    def test_a_successor_that_was_given_up_is_next_again_while_only_older_ones_run(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "rerun")
        self.pass_time(PATIENCE + 1)

        assert succeed(store, again(call("b", 2000)), "rerun") == MINE

    def test_a_successor_of_a_lock_that_nobody_knows_is_next_all_the_same(self, store: Store) -> None:
        assert succeed(store, call("b", 2000), "rerun") == MINE

        assert refused(store.acquire(call("c", 3000))).first.task_id == "b"
        store.release(call("b"), granted(store.acquire(again(call("b", 2000)))).place)
        self.nothing_is_left(store)

    # Replace.

    def test_a_holder_is_asked_to_make_way_only_when_its_successor_has_come_again(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))

        assert succeed(store, call("b", 2000), "replace") == MINE
        assert store.renew([call("a")], 1.0) == [Answer.DONE]
        assert succeed(store, again(call("b", 2000)), "replace") == MINE
        assert store.renew([call("a")], 1.0) == [Answer.REPLACED]

    def test_a_holder_that_is_replaced_hears_of_it_and_holds_until_it_lets_go(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, again(call("b", 2000)), "replace")

        assert store.renew([call("a")], 1.0) == [Answer.REPLACED]
        assert tokens(store.holders(KEY)) == ["a"]
        assert (store.remaining([call("a")], 1.0)[0] or 0) > 25
        assert granted(store.acquire(call("a", 1000))).place == 1
        assert store.successor(KEY) == "b"
        assert refused(store.acquire(again(call("b", 2000)))).first.token == "a"
        assert store.release(call("a"), 1) is Answer.DONE
        granted(store.acquire(again(call("b", 2000))))
        assert store.renew([call("b")], 1.0) == [Answer.DONE]
        assert store.successor(KEY) is None

    def test_a_holder_stays_if_its_successor_gets_another_place(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000, limit=2)))
        granted(store.acquire(call("b", 1500, limit=2)))
        succeed(store, again(call("c", 2000, limit=2)), "replace")
        store.release(call("b", 1500), 2)

        granted(store.acquire(again(call("c", 2000, limit=2))))

        assert store.renew([call("a"), call("c")], 1.0) == [Answer.DONE, Answer.DONE]
        assert tokens(store.holders(KEY)) == ["a", "c"]

    def test_one_holder_at_a_time_is_asked_to_make_way_and_the_oldest_first(self, store: Store) -> None:
        for name in "xyz":
            granted(store.acquire(call(name, 1000, limit=3)))
        for _ in range(3):
            succeed(store, again(call("b", 2000, limit=3)), "replace")

        assert store.renew([call(name) for name in "zyx"], 1.0) == [Answer.DONE, Answer.DONE, Answer.REPLACED]

    def test_the_last_who_was_published_is_next(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        assert succeed(store, call("b", 2000), "replace") == MINE
        assert succeed(store, call("c", 3000), "replace") == MINE

        assert succeed(store, again(call("b", 2000)), "replace") == merged_into("c")
        assert succeed(store, call("old", 2500), "replace") == merged_into("c")
        assert refused(store.acquire(again(call("b", 2000)))).successor == "c"
        store.release(call("a"), 1)
        assert refused(store.acquire(again(call("b", 2000)))).first.task_id == "c"
        granted(store.acquire(again(call("c", 3000))))

    def test_a_successor_that_was_replaced_is_told_even_after_the_newer_one_has_ended(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        succeed(store, call("c", 3000), "replace")
        store.release(call("a"), 1)
        store.release(call("c"), granted(store.acquire(again(call("c", 3000)))).place)

        conflict = refused(store.acquire(again(call("b", 2000))))

        assert (conflict.successor, conflict.first.task_id) == ("c", "c")
        assert succeed(store, again(call("b", 2000)), "replace") == merged_into("c")
        self.pass_time(MEMORY - 100)
        refused(store.acquire(again(call("b", 2000))))
        assert store.unmark(KEY, "b")
        self.nothing_is_left(store)

    def test_a_successor_that_was_given_up_and_then_replaced_is_told_as_well(self, store: Store) -> None:
        granted(store.acquire(claim("a", ttl=100.0, task_id="a", published=10**12)))
        succeed(store, call("b", 2000), "replace")
        self.pass_time(PATIENCE + 1)
        succeed(store, call("c", 3000), "replace")
        store.release(call("a"), 1)
        store.release(call("c"), granted(store.acquire(again(call("c", 3000)))).place)

        assert refused(store.acquire(again(call("b", 2000)))).successor == "c"

    def test_an_older_call_replaces_neither_a_newer_run_nor_its_successor(self, store: Store) -> None:
        granted(store.acquire(call("a", 2000)))

        assert succeed(store, again(call("retry", 1000)), "replace") == merged_into("a")
        assert store.renew([call("a")], 1.0) == [Answer.DONE]
        assert store.successor(KEY) is None
        succeed(store, call("b", 3000), "replace")
        assert succeed(store, again(call("retry", 2500)), "replace") == merged_into("b")
        assert store.successor(KEY) == "b"

    def test_a_replaced_successor_that_ends_is_forgotten(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        succeed(store, call("c", 3000), "replace")
        assert store.unmark(KEY, "b")
        assert store.unmark(KEY, "c")
        store.release(call("a"), 1)

        self.nothing_is_left(store)
