"""What a person sees of locks, and how a person frees one."""

import threading

import pytest

from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.inventory import Survey
from celery_singleton_lock.stores.records import Answer, Slot, marker_of
from tests.contract.asking import (
    KEY,
    OTHER,
    SHORT,
    SLOTS,
    Contract,
    again,
    call,
    claim,
    granted,
    mark_queued,
    queued,
    refused,
    succeed,
    tokens,
)

START = "singleton:v3:{"
ALICE = "alice@ops-1"


def surveyed(store: Store, key: str = KEY) -> Survey:
    (survey,) = store.survey([key])
    return survey


def broken(store: Store, token: str | None = None, *, force: bool = False) -> tuple[list[str], list[str]]:
    """Whom a break was about, and what it has dropped."""
    asked = store.break_lock(KEY, token, ALICE, force=force)
    return tokens(asked.holders), list(asked.dropped)


class Breaking(Contract):
    """Looking after locks that are not one's own."""

    # Seeing.

    def test_each_lock_is_found_once(self, store: Store) -> None:
        for number in range(3):
            store.acquire(claim("a", key=f"singleton:v3:{{shop.{number}:00}}"))
        mark_queued(store, "q")
        store.acquire(claim("a", key="singleton2:v3:{shop:00}"))

        found = list(store.keys(START))

        assert sorted(found) == sorted([KEY, *(f"singleton:v3:{{shop.{number}:00}}" for number in range(3))])

    def test_what_is_no_lock_is_not_found(self, store: Store) -> None:
        store.claim_slot(f"{KEY}:slots}}", Slot("entry", 1, 1))

        assert list(store.keys(START)) == []

    def test_nothing_is_without_an_end(self, store: Store) -> None:
        store.acquire(call("a"))
        mark_queued(store, "q")
        store.mark_done(KEY, marker_of("a", 1), 0, "stored", 60.0)
        store.claim_slot(SLOTS, Slot("entry", 1, 1))

        assert list(store.without_expiry("singleton:v3:")) == []

    def test_a_store_tells_how_soon_it_answers_and_what_its_clock_shows(self, store: Store) -> None:
        echo = store.echo(30.0)

        assert 0.0 <= echo.round_trip < 30.0
        assert abs(echo.ahead) < 1.0

    @pytest.mark.parametrize("prefix", ["a*", "a?", "[a]", "a\\"])
    def test_a_prefix_means_itself_and_no_pattern(self, store: Store, prefix: str) -> None:
        for start in (prefix, "ab", "abc", "a"):
            store.acquire(claim("a", key=f"{start}:v3:{{shop:00}}"))

        assert list(store.keys(f"{prefix}:v3:{{")) == [f"{prefix}:v3:{{shop:00}}"]

    def test_a_key_of_which_nothing_is_known_is_surveyed_as_empty(self, store: Store) -> None:
        survey = surveyed(store)

        assert (survey.fence, survey.holders, survey.marks, survey.waiters) == (None, (), (), 0)
        assert store.survey([]) == []

    def test_a_survey_tells_holders_marks_and_waiters(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a", task_id="id-of-a", pid=7)))
        mark_queued(store, "id-of-q", seconds=60.0, quiet=20.0)
        succeed(store, call("id-of-r", 1.0), "rerun")
        with self.waiting(store, "v", "w"):
            survey = surveyed(store)

        (holder,) = survey.holders
        assert (holder.task_id, holder.pid, holder.fence, survey.fence) == ("id-of-a", 7, grant.fence, grant.fence)
        assert [(mark.state, mark.task_id, mark.task_name) for mark in survey.marks] == [
            ("queued", "id-of-q", None),
            ("next", "id-of-r", "shop.tasks.sync"),
            ("quiet", "id-of-q", None),
        ]
        assert 50 < survey.marks[0].expires_in <= 60
        assert survey.waiters == 2

    def test_a_survey_changes_nothing(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with self.waiting(store, "w"):
            self.pass_time(5 * SHORT)
            assert surveyed(store).waiters == 0
            assert surveyed(store).holders == ()

    def test_a_survey_tells_whether_a_call_waits_for_the_key(self, store: Store) -> None:
        store.acquire(claim("a", task_id="id-of-a"))
        with store.waiter(claim("w", task_id="id-of-w")) as waiter:
            queued(waiter.ask())
            found = {task_id: store.survey([KEY, OTHER], task_id) for task_id in ("id-of-w", "id-of-a", "id-of-", "")}

        (here, other), *others = found.values()
        assert here.turn is not None
        assert here.turn > 0
        assert {other.turn, *(survey.turn for surveys in others for survey in surveys)} == {None}

    def test_a_call_whose_turn_has_ended_does_not_wait(self, store: Store) -> None:
        store.acquire(claim("a"))
        with store.waiter(claim("w", ttl=SHORT, task_id="id-of-w")) as waiter:
            queued(waiter.ask())
            self.pass_time(5 * SHORT)
            assert store.survey([KEY], "id-of-w")[0].turn is None

    def test_keys_are_surveyed_in_their_order(self, store: Store) -> None:
        store.acquire(claim("a", key=OTHER))

        assert [(survey.key, len(survey.holders)) for survey in store.survey([KEY, OTHER])] == [(KEY, 0), (OTHER, 1)]

    # Asking a holder to end.

    def test_a_holder_that_is_asked_keeps_its_lease_until_it_has_ended(self, store: Store) -> None:
        store.acquire(claim("a"))

        assert broken(store) == (["a"], [])
        refused(store.acquire(claim("b")))
        assert store.renew([claim("a")], 1.0) == [Answer.BROKEN]
        refused(store.acquire(claim("b")))
        assert store.broken_by(claim("a")) == ALICE
        assert store.release(claim("a"), 1) is Answer.DONE
        granted(store.acquire(claim("b")))

    def test_nothing_is_left_of_one_that_was_asked_and_has_ended(self, store: Store) -> None:
        store.acquire(claim("a"))
        broken(store)
        store.renew([claim("a")], 1.0)

        store.release(claim("a"), 1)

        self.nothing_is_left(store)

    def test_a_holder_that_does_not_hear_of_it_is_gone_after_its_ttl(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        broken(store)

        self.let_expire(store)

        assert granted(store.acquire(claim("b"))).took_over
        assert store.renew([claim("b")], 1.0) == [Answer.DONE]
        assert store.broken_by(claim("a")) is None

    def test_nobody_is_asked_where_nobody_is(self, store: Store) -> None:
        assert broken(store) == ([], [])
        assert broken(store, force=True) == ([], [])
        self.nothing_is_left(store)

    def test_one_of_several_may_be_meant(self, store: Store) -> None:
        for token in "abc":
            store.acquire(claim(token, limit=3))
        mark_queued(store, "q")

        assert broken(store, "b") == (["b"], [])

        answers = store.renew([claim(token) for token in "abc"], 1.0)
        assert answers == [Answer.DONE, Answer.BROKEN, Answer.DONE]
        assert [mark.state for mark in surveyed(store).marks] == ["queued"]

    def test_a_token_that_nobody_has_breaks_nothing(self, store: Store) -> None:
        store.acquire(claim("a"))

        assert broken(store, "b", force=True) == ([], [])
        assert store.renew([claim("a")], 1.0) == [Answer.DONE]

    def test_to_ask_twice_is_to_ask_once(self, store: Store) -> None:
        store.acquire(claim("a"))
        broken(store)
        store.renew([claim("a")], 1.0)

        assert broken(store) == (["a"], [])
        assert store.renew([claim("a")], 1.0) == [Answer.BROKEN]

    def test_one_that_makes_way_for_a_successor_ends_for_the_person(self, store: Store) -> None:
        self.hold_and_replace(store)

        assert broken(store) == (["a"], ["next"])
        assert store.renew([claim("a")], 1.0) == [Answer.BROKEN]

    def test_a_successor_that_gives_up_does_not_save_one_that_was_broken(self, store: Store) -> None:
        store.acquire(claim("a", task_id="a", published=1))
        broken(store)
        assert succeed(store, call("r", 1.0), "replace") == "r"

        store.unmark(KEY, "r")

        assert store.renew([claim("a")], 1.0) == [Answer.BROKEN]

    def hold_and_replace(self, store: Store) -> None:
        """A holder that was told to make way."""
        store.acquire(claim("a", task_id="a", published=1))
        succeed(store, call("r", 1.0), "replace")
        succeed(store, again(call("r", 1.0)), "replace")
        assert store.renew([claim("a")], 1.0) == [Answer.REPLACED]

    def test_a_cool_down_of_one_that_was_asked_is_none_that_was_asked(self, store: Store) -> None:
        mine = claim("a", min_hold=30.0)
        store.acquire(mine)
        broken(store)

        store.release(mine, 1)

        assert [holder.is_on_hold for holder in surveyed(store).holders] == [True]
        assert broken(store) == ([], ["quiet"])
        self.nothing_is_left(store)

    # Marks and cool-downs.

    def test_marks_go_at_once(self, store: Store) -> None:
        granted(store.acquire(call("a")))
        mark_queued(store, "q", quiet=20.0)
        succeed(store, call("r", 1.0), "rerun")
        store.release(call("a"), 1)

        assert broken(store) == ([], ["queued", "next", "quiet"])
        self.nothing_is_left(store)
        assert mark_queued(store, "other") is None

    def test_marks_whose_time_has_come_are_not_told_of(self, store: Store) -> None:
        store.acquire(claim("a", ttl=30 * SHORT))
        mark_queued(store, "q", seconds=SHORT)
        self.pass_time(2 * SHORT)

        assert surveyed(store).marks == ()
        assert broken(store) == (["a"], [])

    def test_a_place_that_is_held_back_is_free_at_once(self, store: Store) -> None:
        mine = claim("a", min_hold=30.0)
        store.acquire(mine)
        store.release(mine, 1)

        assert broken(store) == ([], ["quiet"])
        assert not granted(store.acquire(claim("b"))).took_over

    def test_one_that_waits_behind_a_cool_down_is_woken(self, store: Store) -> None:
        mine = claim("a", ttl=60.0, min_hold=60.0)
        store.acquire(mine)
        store.release(mine, 1)

        self.is_woken(store)

    # By force.

    def test_force_frees_at_once(self, store: Store) -> None:
        store.acquire(claim("a"))

        assert broken(store, force=True) == (["a"], [])
        self.nothing_is_left(store)
        grant = granted(store.acquire(claim("b")))
        assert store.renew([claim("a")], 1.0) == [Answer.TAKEN]
        assert store.release(claim("a"), 1) is Answer.TAKEN
        assert grant.place == 1

    def test_force_frees_one_that_was_asked_before(self, store: Store) -> None:
        store.acquire(claim("a"))
        broken(store)

        assert broken(store, force=True) == (["a"], [])
        self.nothing_is_left(store)

    def test_force_frees_all_places(self, store: Store) -> None:
        for token in "abc":
            store.acquire(claim(token, limit=3))

        assert broken(store, "c", force=True) == (["c"], [])
        assert broken(store, force=True) == (["a", "b"], [])
        self.nothing_is_left(store)

    def test_a_fence_grows_over_a_break_by_force(self, store: Store) -> None:
        fence = granted(store.acquire(claim("a"))).fence
        broken(store, force=True)

        assert granted(store.acquire(claim("b"))).fence > fence

    def test_force_wakes_the_first_who_waits(self, store: Store) -> None:
        store.acquire(claim("a", ttl=60.0))

        self.is_woken(store, force=True)

    def is_woken(self, store: Store, *, force: bool = False) -> None:
        """One that waits hears of a break, and has its turn."""
        with store.waiter(claim("w", ttl=60.0)) as waiter:
            queued(waiter.ask())
            breaking = threading.Timer(0.2, store.break_lock, (KEY, None, ALICE), {"force": force})
            breaking.start()
            asleep_at = clock()
            waiter.sleep(20)
            assert clock() - asleep_at < 10
            breaking.join()
            granted(waiter.ask())
