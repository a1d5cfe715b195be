"""What a person sees of locks, and how a person frees one."""

import dataclasses
import threading
from typing import Any

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import RELEASED, HolderState, LockState, Marked, Renewal
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    KEY,
    SHORT,
    Contract,
    Waiter,
    again,
    call,
    claim,
    found,
    granted,
    mark_queued,
    queued,
    refused,
    succeed,
    succeeding,
    tokens,
)

ALICE = "alice@ops-1"


def surveyed(store: Store, key: str = KEY) -> LockState:
    (survey,) = store.survey([key])
    return survey


def broken(store: Store, *meant: str, marks: bool = False, force: bool = False) -> tuple[list[str], list[str]]:
    holders, dropped = Inventory(store).break_lock(KEY, meant, ALICE, marks=marks, force=force)
    return tokens(holders), dropped


class Breaking(Contract):
    def test_a_survey_tells_holders_marks_and_waiters(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a", task_id="id-of-a", pid=7)))
        mark_queued(store, "id-of-q", seconds=60.0, cooldown=20.0)
        succeed(store, call("id-of-r", 1.0), "rerun")
        with self.waiting(store, "v", "w"):
            survey = surveyed(store)

        (holder,) = survey.places
        assert (holder.task_id, holder.pid, holder.fence, survey.fence) == ("id-of-a", 7, grant.fence, grant.fence)
        assert [(mark.state, mark.task_id, mark.task_name) for mark in survey.marks] == [
            ("queued", "id-of-q", None),
            ("next", "id-of-r", "shop.tasks.sync"),
            ("cooldown", "id-of-q", None),
        ]
        assert 50 < survey.marks[0].expires_in <= 60
        assert survey.waiting == 2

    def test_whatever_keeps_a_call_out_says_what_it_is(self, store: Store) -> None:
        def in_the_way(**wanted: Any) -> tuple[str | None, HolderState]:
            first = refused(store.acquire(dataclasses.replace(claim("n"), **wanted))).first
            return first.task_id, first.state

        mark_queued(store, "id-of-q", cooldown=20.0)
        assert in_the_way(heeds_queued=True) == ("id-of-q", HolderState.QUEUED)
        store.unmark(KEY, "id-of-q", ends_cooldown=False)
        assert found(mark_queued(store, "id-of-p")).state is HolderState.COOLDOWN
        granted(store.acquire(claim("a", task_id="id-of-a", min_hold=20.0)))
        assert in_the_way() == ("id-of-a", HolderState.HELD)
        store.release(claim("a", min_hold=20.0), 1)
        assert in_the_way() == ("id-of-a", HolderState.COOLDOWN)
        older, newer = call("id-of-o", 1.0), call("id-of-r", 2.0)
        succeed(store, older, "rerun")
        succeed(store, newer, "rerun")
        self.pass_time(21.0)
        assert in_the_way() == ("id-of-r", HolderState.NEXT)
        granted(store.acquire(again(succeeding(newer, "rerun"))))
        store.release(newer, 1)
        assert refused(store.acquire(again(succeeding(older, "rerun")))).first.state is HolderState.ENDED
        granted(store.acquire(claim("b")))
        with self.waiting(store, "w"):
            store.release(claim("b"), 1)
            assert in_the_way() == (None, HolderState.WAITING)

    def test_a_holder_that_was_asked_to_stop_says_so_and_no_other_does(self, store: Store) -> None:
        # They end in another order than that of their places.
        for token, ttl in (("a", 30.0), ("b", 20.0), ("c", 10.0)):
            granted(store.acquire(claim(token, ttl=ttl, limit=3)))
        assert broken(store, "b") == (["b"], [])

        survey = surveyed(store)

        assert survey.asked_by == {"b": ALICE}
        assert {each.token: each.state for each in survey.places} == {
            "a": HolderState.HELD,
            "b": HolderState.ASKED_TO_STOP,
            "c": HolderState.HELD,
        }
        assert tokens(survey.holders) == ["a", "b", "c"]

    def test_a_holder_that_its_successor_has_asked_to_stop_says_so_as_well(self, store: Store) -> None:
        granted(store.acquire(claim("a")))
        newer = call("id-of-r", 1.0)
        succeed(store, newer, "replace")
        assert surveyed(store).holders[0].state is HolderState.HELD, "its message is not back in the broker yet"

        refused(store.acquire(again(succeeding(newer, "replace"))))

        survey = surveyed(store)
        assert (survey.holders[0].state, survey.asked_by) == (HolderState.ASKED_TO_STOP, {})

    def test_a_holder_that_is_asked_keeps_its_lease_until_it_has_ended(self, store: Store) -> None:
        store.acquire(claim("a"))

        assert broken(store, "a") == (["a"], [])
        refused(store.acquire(claim("b")))
        assert store.renew([claim("a")], 1.0) == [Renewal.BROKEN]
        refused(store.acquire(claim("b")))
        assert store.asked_to_stop_by(claim("a"), "broken") == ALICE
        assert store.release(claim("a"), 1) == RELEASED
        granted(store.acquire(claim("b")))

    def test_a_holder_that_does_not_hear_of_it_is_gone_after_its_ttl(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        broken(store, "a")

        self.let_expire(store)

        assert granted(store.acquire(claim("b"))).took_over
        assert store.renew([claim("b")], 1.0) == [Renewal.RENEWED]
        assert store.asked_to_stop_by(claim("a"), "broken") is None

    def test_marks_go_at_once(self, store: Store) -> None:
        granted(store.acquire(call("a")))
        mark_queued(store, "q", cooldown=20.0)
        succeed(store, call("r", 1.0), "rerun")
        store.release(call("a"), 1)

        assert broken(store, marks=True) == ([], ["queued", "next", "cooldown"])
        self.nothing_is_left(store)
        assert mark_queued(store, "other") == Marked()

    def test_force_frees_all_places(self, store: Store) -> None:
        for token in "abc":
            store.acquire(claim(token, limit=3))

        assert broken(store, "c", force=True) == (["c"], [])
        assert broken(store, "a", "b", "gone", force=True) == (["a", "b"], [])
        self.nothing_is_left(store)

    def test_force_wakes_the_first_who_waits(self, store: Store) -> None:
        store.acquire(claim("a", ttl=60.0))

        with Waiter(store, claim("w", ttl=60.0)) as waiter:
            queued(waiter.ask())
            breaking = threading.Timer(0.2, Inventory(store).break_lock, (KEY, ["a"], ALICE), {"force": True})
            breaking.start()
            asleep_at = clock()
            waiter.sleep(20)
            assert clock() - asleep_at < 10
            breaking.join()
            granted(waiter.ask())
