"""The turns of messages: a call that is refused waits in the broker, and keeps its turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock.leases.line import InLine, Line
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import WHOLE, Claim, Conflict, Done, Grant, Marked, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    CLOCKS_DIFFER_BY,
    ENDED,
    KEY,
    SHORT,
    WOKEN,
    Contract,
    Waiter,
    claim,
    granted,
    mark_queued,
    marker_of,
    queued,
    refused,
    succeeding,
    successor_of,
)
from tests.contract.chapters.hearing import unheard
from tests.waiting import until

ON_ITS_WAY = 2.0
"""Seconds in which a message comes from a refusal to a worker that listens."""

LASTS = 600.0
MANY = 450
"""More turns than one script reads."""


def message(task_id: str, published: float = 0.0, token: str = "", **more: Any) -> Claim:
    """The claim of a call that waits in the broker; published so many seconds after 2020."""
    at = round((1_577_836_800 + published) * 1_000_000)
    return Claim(KEY, token or f"of-{task_id}", 30.0, task_id=task_id, published=at, turn_for=LASTS, **more)


def turn_of(store: Store, task_id: str, published: float = 0.0) -> Claim:
    claim = message(task_id, published)
    return replace(claim, rank=refused(store.acquire(claim)).rank)


def line_of(store: Store) -> list[str]:
    (state,) = store.survey([KEY])
    return [turn.task_id for turn in state.turns]


@contextmanager
def listening(store: Store, *task_ids: str) -> Iterator[dict[str, list[str]]]:
    heard: dict[str, list[str]] = {each: [] for each in task_ids}
    for each in task_ids:
        store.listener.add(f"{KEY}:@{each}", heard[each].append)
    try:
        for each in task_ids:
            until(lambda texts=heard[each]: texts, f"{each} listens")
            heard[each].clear()
        yield heard
    finally:
        for each in task_ids:
            store.listener.remove(f"{KEY}:@{each}")
        until(lambda: all(unheard(store, f"{KEY}:@{each}") for each in task_ids), "the store knows that nobody listens")


class Turns(Contract):
    def test_messages_are_served_in_the_order_of_their_first_refusal(self, store: Store) -> None:
        store.acquire(claim("a"))
        calls = [turn_of(store, each, published=number * 60) for number, each in enumerate(["c", "a", "b"])]
        served = list[str]()
        holder = claim("a")
        with listening(store, "a", "b", "c") as heard:
            while calls:
                store.release(holder, None)
                until(lambda: _called(heard) - {*served}, "the next one is called")
                (name,) = _called(heard) - {*served}
                (holder,) = [each for each in calls if each.task_id == name]
                granted(store.acquire(holder))
                served.append(name)
                calls.remove(holder)

        assert served == ["c", "a", "b"]

    def test_the_next_one_is_called_as_the_mark_ends_that_kept_it_out(self, store: Store) -> None:
        assert store.mark_queued(KEY, "workflow", 600.0, limit=0, cooldown=0.0) == Marked()
        waiting = message("waiting", heeds_queued=True)
        assert refused(store.acquire(waiting)).rank
        with listening(store, "waiting") as heard:
            assert not store.unmark(KEY, "workflow", ends_cooldown=False)

            until(lambda: _called(heard) == {"waiting"}, "it is called")
        granted(store.acquire(waiting))

    def test_those_that_are_refused_in_one_moment_are_served_in_the_order_of_their_publication(
        self, store: Store
    ) -> None:
        store.acquire(claim("a"))
        published = {"first": 1, "third": 3, "fourth": 4, "second": 2}
        turns = {name: turn_of(store, name, at) for name, at in published.items()}
        assert line_of(store) == ["first", "second", "third", "fourth"]

        # The store has lost its turn.
        store.unmark(KEY, "second")
        refused(store.acquire(turns["second"]))
        assert line_of(store) == ["first", "second", "third", "fourth"]

    def test_those_in_a_slot_and_those_in_the_broker_wait_in_one_line(self, store: Store) -> None:
        store.acquire(claim("a"))
        first = turn_of(store, "first")
        with listening(store, "first") as heard, Waiter(store, claim("w", task_id="second")) as waiter:
            queued(waiter.ask())
            store.release(claim("a"), 1)
            until(lambda: first.task_id in _called(heard), "it is called")
            queued(waiter.ask())
            granted(store.acquire(first))
            store.release(first, 1)
            granted(waiter.ask())

    def test_who_waits_in_a_slot_looks_again_once_a_message_before_it_should_have_come(self, store: Store) -> None:
        store.acquire(claim("a"))
        turn_of(store, "lost")
        store.release(claim("a"), 1)
        with Waiter(store, claim("w")) as waiter:
            assert queued(waiter.ask()) <= ON_ITS_WAY
            self.pass_time(ON_ITS_WAY + 1)
            granted(waiter.ask())

    def test_who_waits_behind_a_message_that_listens_for_long_has_a_moment_to_look_again(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        turn_of(store, "listens")
        with listening(store, "listens"), Waiter(store, claim("w")) as waiter:
            queued(waiter.ask())
            self.pass_time(SHORT + 0.1)
            assert 0 < queued(waiter.ask()) <= WOKEN

    def test_those_that_were_passed_over_keep_their_order_when_they_come(self, store: Store) -> None:
        store.acquire(claim("a"))
        calls = [turn_of(store, each) for each in ("1", "2", "3", "4", "5")]
        with listening(store, "4", "5"):
            self.pass_time(ON_ITS_WAY + 1)
            store.release(claim("a"), 1)
            granted(store.acquire(calls[3]))
            for each in (calls[1], calls[2], calls[0]):
                refused(store.acquire(each))

        assert line_of(store) == ["1", "2", "3", "5"]

    def test_a_grant_calls_the_others_for_whom_places_are_left(self, store: Store) -> None:
        holders = [claim(each, ttl=SHORT, limit=3) for each in "abc"]
        for each in holders:
            store.acquire(each)
        calls = [replace(message(f"m{number}", number), limit=3) for number in range(3)]
        for each in calls:
            refused(store.acquire(each))
        with listening(store, "m1", "m2") as heard:
            self.pass_time(SHORT + 0.1)
            assert store.look(calls[0]).comes
            granted(store.acquire(calls[0]))
            until(lambda: _called(heard) == {"m1", "m2"}, "the others are called")

    def test_who_gets_the_whole_lock_calls_nobody(self, store: Store) -> None:
        first, second = claim(f"{WHOLE}first"), claim(f"{WHOLE}second")
        store.acquire(first)
        with Waiter(store, second) as waiter, listening(store, "m") as heard:
            queued(waiter.ask())
            refused(store.acquire(replace(message("m", published=1e9), limit=3)))
            store.release(first, 1)
            granted(waiter.ask())
            store.call(store.servers.publish, f"{KEY}:@m", "the last word")
            until(lambda: "the last word" in heard["m"], "all is heard")

        assert "free" not in heard["m"]

    def test_a_newcomer_does_not_overtake_a_message_that_is_called_or_on_its_way(self, store: Store) -> None:
        store.acquire(claim("a"))
        on_its_way = turn_of(store, "on its way")
        store.release(claim("a"), 1)
        assert refused(store.acquire(claim("newcomer"))).first.task_id == "on its way"

        with listening(store, "on its way") as heard:
            self.pass_time(ON_ITS_WAY + 1)
            assert refused(store.acquire(claim("newcomer"))).first.task_id == "on its way"
            until(lambda: on_its_way.task_id in _called(heard), "it is called")
        # It listens no longer, because it comes.
        assert refused(store.acquire(claim("newcomer"))).first.task_id == "on its way"
        granted(store.acquire(on_its_way))

    def test_a_turn_that_nobody_listens_for_is_passed_over_once_its_message_should_have_come_and_keeps_its_place(
        self, store: Store
    ) -> None:
        store.acquire(claim("a"))
        dead = [turn_of(store, f"dead {number}") for number in range(100)]
        self.pass_time(ON_ITS_WAY + 1)
        lives = turn_of(store, "lives")
        with listening(store, "lives") as heard:
            store.release(claim("a"), 1)
            until(lambda: lives.task_id in _called(heard), "it is called")

        granted(store.acquire(lives))
        assert line_of(store) == [each.task_id for each in dead]
        self.pass_time(LASTS)
        store.release(lives, 1)
        self.nothing_is_left(store)

    def test_where_nobody_listens_the_next_is_called_at_once_and_who_is_back_goes_before_it_again(
        self, store: Store
    ) -> None:
        holder = claim("a", ttl=300.0)
        store.acquire(holder)
        first, second, _ = calls = [turn_of(store, each) for each in ("first", "second", "third")]
        with listening(store, "first"):
            assert not any(store.look(each).comes for each in calls)
            # Much longer than a message is on its way.
            self.pass_time(60)
        with listening(store, "second", "third") as heard:
            store.release(holder, 1)
            until(lambda: _called(heard) == {"second"}, "it is called at once")
            granted(store.acquire(second))
            with listening(store, "first") as back:
                assert store.look(first).is_near
                store.release(second, 1)
                until(lambda: _called(back) == {"first"}, "it is called")
            assert line_of(store) == ["first", "third"]
            granted(store.acquire(first))
            assert _called(heard) == {"second"}

    def test_a_call_whose_turn_the_store_has_lost_comes_back_to_its_place(self, store: Store) -> None:
        store.acquire(claim("a"))
        calls = [turn_of(store, str(number)) for number in range(150)]
        for each in calls:
            store.unmark(KEY, each.task_id)
        assert line_of(store) == []
        for each in (*calls[40::-1], *calls[100:], *calls[41:100]):
            assert refused(store.acquire(each)).rank == each.rank

        assert line_of(store) == [each.task_id for each in calls]

    def test_the_first_of_a_long_line_stays_the_first_as_a_call_comes_back_behind_it(self, store: Store) -> None:
        store.acquire(claim("a"))
        first = turn_of(store, "first")
        self.pass_time(ON_ITS_WAY + 1)
        for number in range(100):
            turn_of(store, f"later {number}", published=1 + number)
        refused(store.acquire(replace(message("lost"), rank=first.rank + 1)))
        assert line_of(store)[:3] == ["first", "lost", "later 0"]
        with listening(store, "first", "lost") as heard:
            store.release(claim("a"), None)

            until(lambda: _called(heard), "one of them is called")
        assert _called(heard) == {"first"}

    def test_a_rank_that_lies_ahead_counts_from_now(self, store: Store) -> None:
        # The clock of the store was set back meanwhile; or the message is another store's.
        store.acquire(claim("a"))
        ahead = turn_of(store, "ahead")
        store.unmark(KEY, "ahead")
        refused(store.acquire(replace(ahead, rank=ahead.rank + 10**12)))
        self.pass_time(ON_ITS_WAY + 1)
        turn_of(store, "later")

        assert line_of(store) == ["ahead", "later"]

    def test_a_newcomer_that_can_wait_goes_behind_those_that_are_unheard_for_a_moment(self, store: Store) -> None:
        store.acquire(claim("a"))
        away = turn_of(store, "away")
        with listening(store, "away"):
            assert not store.look(away).comes
        self.pass_time(ON_ITS_WAY + 1)
        store.release(claim("a"), 1)

        newcomer = turn_of(store, "newcomer")
        assert refused(store.acquire(message("another"))).first.task_id == "away"
        # Once it has a turn, nobody waits for one that is away.
        assert store.look(newcomer).comes
        granted(store.acquire(newcomer))
        store.release(newcomer, 1)
        self.pass_time(ON_ITS_WAY + 1)
        granted(store.acquire(message("after a while")))
        refused(store.acquire(away))
        assert line_of(store) == ["away", "another"]

    def test_who_cannot_wait_is_not_kept_out_by_one_that_is_away(self, store: Store) -> None:
        store.acquire(claim("a"))
        away = turn_of(store, "away")
        with listening(store, "away"):
            assert not store.look(away).comes
        store.release(claim("a"), 1)

        granted(store.acquire(claim("newcomer")))

    def test_a_call_that_was_called_and_does_not_come_is_passed_over(self, store: Store) -> None:
        store.acquire(claim("a"))
        busy, other = turn_of(store, "busy"), turn_of(store, "other")
        with listening(store, "busy", "other") as heard:
            released_at = clock()
            store.release(claim("a"), 1)
            until(lambda: busy.task_id in _called(heard), "it is called")
            # A machine that stands still meanwhile has passed it over.
            assert not store.look(other).comes or clock() > released_at + WOKEN - CLOCKS_DIFFER_BY
            self.pass_time(WOKEN + 0.1)
            assert store.look(other).comes

        assert line_of(store) == ["busy", "other"]

    def test_the_line_does_not_wait_for_each_turn_of_a_worker_that_is_busy(self, store: Store) -> None:
        store.acquire(claim("a"))
        busy = [turn_of(store, f"busy {number}") for number in range(6)]
        free, last = turn_of(store, "free"), turn_of(store, "last")
        names = [each.task_id for each in (*busy, free, last)]
        with listening(store, *names) as heard:
            store.release(claim("a"), 1)
            until(lambda: len(_called(heard)) == 1, "the first is called")
            for called in (3, 7):
                assert free.task_id not in _called(heard)
                # Whoever is not called yet looks as soon as the first should have come.
                place = store.look(last)
                assert (place.comes, place.is_near) == (False, True)
                assert 0 < place.free_in <= WOKEN
                self.pass_time(WOKEN + 0.1)
                store.look(last)
                until(lambda most=called: len(_called(heard)) == most, "twice as many are called")

            assert free.task_id in _called(heard)
        assert len(line_of(store)) == len(names)

    def test_only_the_next_few_are_near(self, store: Store) -> None:
        store.acquire(claim("a"))
        calls = [turn_of(store, str(number)) for number in range(5)]

        with listening(store, *map(str, range(5))):
            assert [store.look(each).is_near for each in calls] == [True, True, True, False, False]
            assert [refused(store.acquire(each)).is_near for each in calls] == [True, True, True, False, False]
            store.release(claim("a"), 1)
            assert store.look(calls[-1]).is_near, "it finds soon whether the first comes"

    def test_who_looks_and_has_no_turn_comes_and_leaves_nothing(self, store: Store) -> None:
        stranger = replace(message("stranger"), rank=7)
        for each in (stranger, message("newcomer")):
            assert store.look(each).comes
            self.nothing_is_left(store)

        store.acquire(claim("a"))
        assert store.look(stranger).comes
        assert line_of(store) == []

    def test_a_newcomer_whose_worker_listens_has_a_turn_before_its_run_has_asked(self, store: Store) -> None:
        store.acquire(claim("a", task_id="holder"))
        newcomer = message("newcomer")
        with listening(store, "newcomer") as heard:
            answer = refused(store.look(newcomer))
            assert (answer.first.task_id, answer.is_near) == ("holder", True)
            # It is not on its way: it is there.
            self.pass_time(ON_ITS_WAY + 1)
            later = turn_of(store, "later")
            assert not store.look(later).comes
            store.release(claim("a"), 1)
            until(lambda: _called(heard) == {"newcomer"}, "it is called")

            granted(store.acquire(replace(newcomer, rank=answer.rank)))
        assert line_of(store) == ["later"]

    def test_a_turn_that_is_taken_for_a_message_which_has_gone_meanwhile_ends(self, store: Store) -> None:
        store.acquire(claim("a"))
        heard = list[Conflict]()

        class Gone(InLine):
            def has_turn(self, conflict: Conflict) -> bool:
                return bool(heard.append(conflict))

        line, one = Line(), Gone(store, message("gone"), float("inf"))

        line.add(one)
        until(lambda: heard, "it has a turn")
        until(lambda: line_of(store) == [], "it has none")
        line.remove(one)

    def test_a_newcomer_that_is_a_copy_hears_of_the_run_of_its_message(self, store: Store) -> None:
        original = message("twice")
        granted(store.acquire(original))
        copy = replace(original, token="of the copy", may_be_copy=True)
        assert refused(store.look(copy)).is_own
        store.release(original, 1, ENDED)

        assert isinstance(store.look(copy), Done)
        assert line_of(store) == []

    def test_a_holder_that_has_died_is_found_by_the_first_that_looks(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        first = turn_of(store, "first")
        assert store.look(first).free_in == pytest.approx(SHORT, abs=1)

        self.pass_time(SHORT + 0.1)

        assert store.look(first).comes
        assert granted(store.acquire(first)).took_over

    def test_a_cool_down_has_the_first_one_look_when_it_ends(self, store: Store) -> None:
        store.acquire(claim("a", min_hold=20.0))
        first = turn_of(store, "first")
        with listening(store, "first") as heard:
            store.release(claim("a", min_hold=20.0), 1)
            # It need not come before.
            until(lambda: heard["first"] == ["near"], "it is told")

            place = store.look(first)

        assert not place.comes
        assert place.free_in == pytest.approx(20, abs=5)

    def test_a_cool_down_has_the_first_one_look_though_those_between_have_left(self, store: Store) -> None:
        store.acquire(claim("a"))
        names = ("first", "second", "third", "fourth", "fifth")
        calls = {name: replace(turn_of(store, name), min_hold=20.0) for name in names}
        with listening(store, "first", "fifth") as heard:
            for name in names[1:4]:
                store.unmark(KEY, name)
            store.release(claim("a"), 1)
            until(lambda: heard["first"], "it is called")
            granted(store.acquire(calls["first"]))
            store.release(calls["first"], 1)
            until(lambda: heard["fifth"], "the only one that waits is told of the cool-down")

    def test_as_many_are_called_as_places_are_free(self, store: Store) -> None:
        holders = [claim(each, limit=3) for each in "abc"]
        for each in holders:
            store.acquire(each)
        calls = [replace(message(f"m{number}", number), limit=3) for number in range(4)]
        for each in calls:
            refused(store.acquire(each))
        with listening(store, *(f"m{number}" for number in range(4))) as heard:
            for each in holders[:2]:
                store.release(each, None)
            until(lambda: _called(heard) == {"m0", "m1"}, "two are called")
            assert isinstance(store.acquire(calls[1]), Grant)
            assert isinstance(store.acquire(calls[0]), Grant)
            assert isinstance(store.acquire(calls[2]), Conflict)

    def test_a_call_whose_task_has_another_policy_by_now_does_not_find_its_own_turn_in_its_way(
        self, store: Store
    ) -> None:
        store.acquire(claim("a"))
        turn = turn_of(store, "moves")
        store.release(claim("a"), 1)

        granted(store.acquire(replace(turn, turn_for=0.0)))

        assert line_of(store) == []

    @pytest.mark.parametrize("is_superseded", [False, True])
    def test_a_refused_call_whose_task_has_another_policy_by_now_leaves_the_line(
        self, store: Store, is_superseded: bool
    ) -> None:
        store.acquire(claim("a"))
        moves = replace(turn_of(store, "moves", published=1.0), turn_for=0.0)
        turn_of(store, "waits", published=2.0)
        if is_superseded:
            refused(store.acquire(succeeding(message("newer", published=3.0), "rerun")))
            moves = succeeding(moves, "rerun")

        assert refused(store.acquire(moves)).successor == ("newer" if is_superseded else None)

        assert "moves" not in line_of(store)
        assert "waits" in line_of(store)

    def test_a_turn_behind_many_unheard_ones_is_shown(self, store: Store) -> None:
        store.acquire(claim("a"))
        for number in range(MANY):
            turn_of(store, f"lost {number}")
        self.pass_time(ON_ITS_WAY)
        store.release(claim("a"), 1)
        granted(store.acquire(claim("b")))
        turn_of(store, "waits")

        assert line_of(store)[-1] == "waits"
        assert store.survey([KEY])[0].waiting == MANY + 1

    def test_a_copy_waits_for_the_turn_of_its_message_and_finds_that_it_was_done(self, store: Store) -> None:
        store.acquire(claim("a"))
        original = turn_of(store, "twice")
        copy = replace(original, token="of the copy", may_be_copy=True)
        assert not refused(store.acquire(copy)).is_own
        store.release(claim("a"), 1)
        granted(store.acquire(original))

        assert refused(store.acquire(copy)).is_own
        assert line_of(store) == []

    def test_the_successor_is_called_and_the_one_that_it_supersedes(self, store: Store) -> None:
        store.acquire(claim("a"))
        old, new = (replace(message(name, at), turn_for=0.0) for name, at in [("old", 1), ("new", 2)])
        refused(store.acquire(succeeding(old, "rerun")))
        with listening(store, "old", "new") as heard:
            refused(store.acquire(succeeding(new, "rerun")))
            until(lambda: heard["old"] == ["free"], "old is told")
            assert refused(store.look(succeeding(replace(old, newest="next"), "rerun"))).successor == "new"
            assert not store.look(succeeding(replace(new, newest="next"), "rerun")).comes
            store.release(claim("a"), 1)
            until(lambda: heard["new"] == ["free"], "new is told")

        assert successor_of(store) == "new"

    def test_a_turn_and_a_successor_do_not_wait_for_each_other(self, store: Store) -> None:
        store.acquire(claim("a"))
        turn = turn_of(store, "waits", 1)
        successor = succeeding(replace(message("next", 2), turn_for=0.0), "rerun")
        refused(store.acquire(successor))
        store.release(claim("a"), 1)

        assert refused(store.acquire(successor)).first.task_id == "waits"
        granted(store.acquire(turn))

    def test_a_marker_behind_a_run_does_not_call_the_successor_again(self, store: Store) -> None:
        store.acquire(claim("a"))
        refused(store.acquire(succeeding(replace(message("new", 1), turn_for=0.0), "rerun")))
        with listening(store, "new") as heard:
            store.release(claim("a"), 1)
            store.mark_done(KEY, marker_of("a"), 0, "stored", 30.0)
            store.call(store.servers.publish, f"{KEY}:@new", "the last word")
            until(lambda: "the last word" in heard["new"], "all is heard")

        assert heard["new"] == ["free", "the last word"]

    def test_a_successor_that_looks_asks_the_holder_to_stop(self, store: Store) -> None:
        store.acquire(claim("a"))
        new = succeeding(replace(message("new", 1), turn_for=0.0), "replace")
        refused(store.acquire(new))
        assert store.renew([claim("a")], 1.0) == [Renewal.RENEWED], "the message of its successor may be lost"
        store.look(replace(new, newest="next"))

        assert store.renew([claim("a")], 1.0) == [Renewal.REPLACED]

    def test_who_looks_as_the_successor_keeps_its_place(self, store: Store) -> None:
        store.acquire(claim("a", ttl=300.0))
        new = succeeding(replace(message("new", 1), turn_for=0.0), "rerun")
        refused(store.acquire(new))
        for _ in range(3):
            self.pass_time(20)
            store.look(replace(new, newest="next"))

        assert successor_of(store) == "new"

    @pytest.mark.parametrize("heeds", [True, False])
    def test_the_queued_call_does_not_wait_for_messages_that_wait_for_it(self, store: Store, heeds: bool) -> None:
        # A retry that counts as queued heeds no mark itself.
        store.acquire(claim("a"))
        first = message("first", 1, heeds_queued=True)
        refused(store.acquire(first))
        assert mark_queued(store, "retry", sent="over") == Marked()
        with listening(store, "first"):
            store.release(claim("a"), 1)
            assert refused(store.acquire(first)).first.task_id == "retry"
            granted(store.acquire(message("retry", 2, heeds_queued=heeds)))

    def test_the_three_next_hear_that_they_are(self, store: Store) -> None:
        store.acquire(claim("a"))
        calls = [turn_of(store, f"m{number}", number) for number in range(5)]
        with listening(store, *(f"m{number}" for number in range(5))) as heard:
            store.release(claim("a"), 1)
            granted(store.acquire(calls[0]))
            until(lambda: heard["m3"] == ["near"], "m3 is told")
            assert heard["m4"] == []

    def test_a_release_calls_the_one_that_lives_behind_many_dead(self, store: Store) -> None:
        store.acquire(claim("a"))
        self.they_have_died(store)
        living = turn_of(store, "living")
        with listening(store, "living") as heard:
            store.release(claim("a"), 1)
            until(lambda: _called(heard) == {"living"}, "it is called")

        granted(store.acquire(living))

    def test_many_dead_keep_no_call_out_that_can_wait(self, store: Store) -> None:
        store.acquire(claim("a", ttl=300.0))
        self.they_have_died(store)
        self.pass_time(301)

        granted(store.acquire(message("b", MANY)))

    def test_one_that_lives_behind_many_dead_finds_by_a_few_looks_that_its_turn_has_come(self, store: Store) -> None:
        store.acquire(claim("a", ttl=300.0))
        self.they_have_died(store)
        living = turn_of(store, "living")
        self.pass_time(301)

        with listening(store, "living"):
            places = [store.look(living)]
            while not places[-1].comes and len(places) < 8:
                assert (places[-1].is_near, places[-1].free_in) == (True, 0.0), "it looks again at once"
                places.append(store.look(living))

        assert places[-1].comes
        granted(store.acquire(living))

    def they_have_died(self, store: Store) -> None:
        for number in range(MANY):
            turn_of(store, f"dead-{number}", number)
        self.pass_time(ON_ITS_WAY + 1)

    def test_there_are_5000_turns_at_most(self, store: Store) -> None:
        store.acquire(claim("a"))
        tickets = [refused(store.acquire(message(f"m{number}", number))).rank for number in range(5003)]

        assert all(tickets[:5001])
        assert tickets[5001:] == [0, 0]


def _called(heard: dict[str, list[str]]) -> set[str]:
    return {task_id for task_id, texts in heard.items() if "free" in texts}
