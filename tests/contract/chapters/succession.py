"""Which call runs next: `rerun` merges, `replace` lets the newest win."""

import pytest

from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Answer, Turn
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

    def test_one_in_whose_favour_an_older_call_has_ended_cannot_just_end(self, store: Store) -> None:
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

    def test_but_not_if_another_one_comes_next(self, store: Store) -> None:
        granted(store.acquire(call("a", 1000)))
        succeed(store, call("b", 2000), "replace")
        succeed(store, again(call("b", 2000)), "replace")
        succeed(store, call("c", 3000), "replace")

        store.unmark(KEY, "b")

        assert store.renew([call("a")], 1.0) == [Answer.REPLACED]

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
