"""What every store of locks owes its callers, and what the one in Redis owes Redis."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from celery_singleton_lock import ConfigurationError, StoreError
from celery_singleton_lock.stores.base import Store, Waiter, clock
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant, Holder, Slot, Succession
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.model.ageing import StandingClock
from tests.servers import Server
from tests.waiting import until

KEY = "singleton:v1:{shop.tasks.sync:00}"
SLOTS = "singleton:v1:{celery.beat:00}:slots"
OTHER = "singleton:v1:{shop.tasks.sync:11}"

SHORT = 10.0
"""A ttl that a test lets pass."""

REAL = 0.3
"""A ttl that a test waits for."""

CLOCKS_DIFFER_BY = 0.02
"""Seconds that the store's clock may gain on the test's."""


LATE = 2.0
"""Seconds that a waiter may be late for its turn."""


def claim(
    token: str, *, key: str = KEY, ttl: float = 30.0, limit: int = 1, min_hold: float = 0.0, **facts: str
) -> Claim:
    return Claim(key, token, ttl, limit, facts, min_hold)


def rerun(token: str, arguments: str = "") -> Claim:
    return Claim(KEY, token, 30.0, facts={"task_id": token}, succession=Succession("rerun", arguments))


def replace(token: str) -> Claim:
    return Claim(KEY, token, 30.0, facts={"task_id": token}, succession=Succession("replace"))


def publish(store: Store, task_id: str, *, counts_running: bool = False, quiet: float = 0.0) -> Holder | None:
    return store.publish(KEY, task_id, 60.0, counts_running=counts_running, quiet=quiet)


def published(found: Holder | None) -> Holder:
    assert found is not None
    return found


def queued_claim(token: str) -> Claim:
    return Claim(KEY, token, 30.0, facts={"task_id": token}, queued=True)


def again(wanted: Claim, asked_at: int) -> Claim:
    """The same, when it comes again."""
    assert wanted.succession is not None
    return dataclasses.replace(wanted, succession=Succession(wanted.succession.policy, "", asked_at))


def granted(answer: Grant | Conflict | float) -> Grant:
    assert isinstance(answer, Grant), answer
    return answer


def queued(answer: Grant | float) -> float:
    assert isinstance(answer, float), answer
    return answer


def refused(answer: Grant | Conflict) -> Conflict:
    assert isinstance(answer, Conflict), answer
    return answer


def tokens(holders: list[Holder] | tuple[Holder, ...]) -> list[str]:
    return sorted(holder.token for holder in holders)


class StoreContract:
    """The tests that a store of locks has to pass.

    A subclass gives the fixtures `store`, a store without any lock in it, and
    `lose_all`, which makes the store forget everything. Its `pass_time` makes the
    locks older without waiting, so that no test depends on how busy a machine is.
    """

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def lose_all(self) -> Callable[[], object]:
        raise NotImplementedError

    def now(self) -> float:
        """Seconds on a clock that goes with the store's."""
        raise NotImplementedError

    def pass_time(self, seconds: float) -> None:
        """Let so much time go by in the store."""
        raise NotImplementedError

    def let_expire(self, store: Store, key: str = KEY) -> None:
        """Let time go by until nobody holds *key*."""
        for _ in range(100):
            self.pass_time(0.05 * SHORT)
            if not store.holders(key):
                return
        raise AssertionError(f"{key} does not expire: {store.holders(key)}")

    @contextmanager
    def waiting(self, store: Store, *names: str, limit: int = 1) -> Iterator[dict[str, Waiter]]:
        """Waiters that have asked in this order, by their tokens."""
        with ExitStack() as stack:
            waiters = {}
            for name in names:
                waiters[name] = stack.enter_context(store.waiter(claim(name, limit=limit)))
                queued(waiters[name].ask())
            yield waiters

    # Acquire.

    def test_a_free_lock_is_granted(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a")))

        assert grant.place == 1
        assert grant.fence > 0
        assert not grant.took_over

    def test_a_held_lock_is_refused_naming_the_holder(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a", task_id="id-of-a", hostname="w1@host", pid="42", attempt="3")))

        conflict = refused(store.acquire(claim("b")))

        assert conflict.key == KEY
        (holder,) = conflict.holders
        assert conflict.first == holder
        assert (holder.key, holder.token, holder.fence) == (KEY, "a", grant.fence)
        assert (holder.task_id, holder.hostname, holder.pid, holder.attempt) == ("id-of-a", "w1@host", 42, 3)
        assert 0 < holder.expires_in <= 30

    def test_a_refused_claim_leaves_the_holder_as_it_was(self, store: Store) -> None:
        store.acquire(claim("a", ttl=30, task_id="id-of-a"))
        (before,) = store.holders(KEY)

        refused(store.acquire(claim("b", ttl=300, task_id="id-of-b")))

        (after,) = store.holders(KEY)
        assert (after.token, after.fence, after.task_id) == (before.token, before.fence, before.task_id)
        assert after.expires_in <= before.expires_in

    def test_locks_with_different_keys_know_nothing_of_each_other(self, store: Store) -> None:
        granted(store.acquire(claim("a")))

        granted(store.acquire(claim("a", key=OTHER)))

        assert store.release(claim("a"), 1) is Answer.DONE
        assert tokens(store.holders(OTHER)) == ["a"]

    def test_asking_again_with_the_same_token_is_the_same_grant(self, store: Store) -> None:
        first = granted(store.acquire(claim("a")))

        again = granted(store.acquire(claim("a")))

        assert (again.place, again.fence, again.since) == (first.place, first.fence, first.since)
        assert not again.took_over
        assert len(store.holders(KEY)) == 1

    def test_asking_again_starts_the_ttl_afresh(self, store: Store) -> None:
        store.acquire(claim("a", ttl=5))

        store.acquire(claim("a", ttl=30))

        assert store.holders(KEY)[0].expires_in > 5

    def test_asking_again_takes_no_second_place(self, store: Store) -> None:
        grants = [granted(store.acquire(claim(token, limit=3))) for token in ["a", "b", "b", "a", "b"]]

        assert [grant.place for grant in grants] == [1, 2, 2, 1, 2]

    def test_a_grant_knows_when_it_was_asked_for(self, store: Store) -> None:
        before = clock()

        grant = granted(store.acquire(claim("a")))

        assert before <= grant.sent_at <= clock()

    def test_a_grant_knows_when_it_was_given(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a")))

        (holder,) = store.holders(KEY)

        assert holder.acquired_at == datetime.fromtimestamp(grant.since, UTC)
        assert abs(grant.since - time.time()) < 60

    # Release.

    def test_a_released_lock_is_free(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a")))

        answer = store.release(claim("a"), grant.place)

        assert answer is Answer.DONE
        assert store.holders(KEY) == []
        assert not granted(store.acquire(claim("b"))).took_over

    def test_a_release_by_a_stranger_leaves_the_lock_alone(self, store: Store) -> None:
        store.acquire(claim("a"))

        answer = store.release(claim("b"), 1)

        assert answer is Answer.TAKEN
        assert tokens(store.holders(KEY)) == ["a"]

    def test_a_release_of_a_free_lock_finds_nothing(self, store: Store) -> None:
        assert store.release(claim("a"), 1) is Answer.GONE
        assert store.release(claim("a"), None) is Answer.GONE

    def test_a_second_release_finds_nothing_or_the_successor(self, store: Store) -> None:
        store.acquire(claim("a"))
        store.release(claim("a"), 1)

        again = store.release(claim("a"), 1)
        store.acquire(claim("b"))
        once_more = store.release(claim("a"), 1)

        assert (again, once_more) == (Answer.GONE, Answer.TAKEN)
        assert tokens(store.holders(KEY)) == ["b"]

    def test_a_run_past_its_deadline_does_not_free_its_successor(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        self.let_expire(store)
        store.acquire(claim("b"))

        answer = store.release(claim("a"), 1)

        assert answer is Answer.TAKEN
        assert tokens(store.holders(KEY)) == ["b"]

    @pytest.mark.parametrize("token", ["a", "b", "c"])
    def test_a_release_without_a_place_finds_it(self, store: Store, token: str) -> None:
        for other in ["a", "b", "c"]:
            store.acquire(claim(other, limit=3))

        answer = store.release(claim(token, limit=3), None)

        assert answer is Answer.DONE
        assert tokens(store.holders(KEY)) == sorted({"a", "b", "c"} - {token})

    def test_a_release_without_a_place_touches_no_others(self, store: Store) -> None:
        for other in ["a", "b"]:
            store.acquire(claim(other, limit=3))

        answer = store.release(claim("d", limit=3), None)

        assert answer is Answer.TAKEN
        assert tokens(store.holders(KEY)) == ["a", "b"]

    # Renew.

    def test_a_renewal_starts_the_ttl_afresh(self, store: Store) -> None:
        store.acquire(claim("a", ttl=5))

        answers = store.renew([claim("a", ttl=30)], 1.0)

        assert answers == [Answer.DONE]
        assert 5 < store.holders(KEY)[0].expires_in <= 30

    def test_a_lock_is_held_for_as_long_as_it_is_renewed(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))

        for _ in range(6):
            self.pass_time(SHORT / 4)
            assert store.renew([claim("a", ttl=SHORT)], 1.0) == [Answer.DONE]

        assert tokens(store.holders(KEY)) == ["a"]

    def test_a_renewal_changes_neither_fence_nor_facts(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a", task_id="id-of-a")))

        store.renew([claim("a")], 1.0)

        (holder,) = store.holders(KEY)
        assert (holder.fence, holder.task_id) == (grant.fence, "id-of-a")
        assert holder.acquired_at == datetime.fromtimestamp(grant.since, UTC)

    def test_a_renewal_by_a_stranger_leaves_the_lock_alone(self, store: Store) -> None:
        store.acquire(claim("a", ttl=5))

        answers = store.renew([claim("b", ttl=300)], 1.0)

        assert answers == [Answer.TAKEN]
        assert tokens(store.holders(KEY)) == ["a"]
        assert store.holders(KEY)[0].expires_in <= 5

    def test_a_lock_that_is_gone_is_not_made_again(self, store: Store) -> None:
        answers = store.renew([claim("a")], 1.0)

        assert answers == [Answer.GONE]
        assert store.holders(KEY) == []
        granted(store.acquire(claim("b")))

    def test_a_released_lock_is_not_revived(self, store: Store) -> None:
        store.acquire(claim("a"))
        store.release(claim("a"), 1)

        answers = store.renew([claim("a")], 1.0)

        assert answers == [Answer.GONE]
        assert store.holders(KEY) == []

    def test_a_lease_past_its_deadline_is_renewed_while_nobody_else_has_had_its_place(self, store: Store) -> None:
        granted(store.acquire(claim("a", ttl=SHORT, limit=2)))
        granted(store.acquire(claim("long", limit=2)))  # so that the key stays
        self.pass_time(1.5 * SHORT)
        ended = tokens(store.holders(KEY))

        answers = store.renew([claim("a", ttl=SHORT, limit=2)], 1.0)

        assert ended == ["long"]
        assert answers == [Answer.DONE]
        assert tokens(refused(store.acquire(claim("b", limit=2))).holders) == ["a", "long"]

    def test_a_lease_whose_key_is_gone_is_not_made_again(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        self.pass_time(2.5 * SHORT)

        answers = store.renew([claim("a", ttl=SHORT)], 1.0)

        assert answers == [Answer.GONE]
        assert store.holders(KEY) == []
        granted(store.acquire(claim("b")))

    def test_a_lease_past_its_deadline_is_renewed_until_a_waiter_has_its_place(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with store.waiter(claim("w")) as waiter:
            queued(waiter.ask())
            self.let_expire(store)
            before = store.renew([claim("a", ttl=SHORT)], 1.0)
            queued(waiter.ask())
            self.let_expire(store)

            granted(waiter.ask())

        assert before == [Answer.DONE]
        assert store.renew([claim("a", ttl=SHORT)], 1.0) == [Answer.TAKEN]
        assert tokens(store.holders(KEY)) == ["w"]

    def test_a_lock_that_has_gone_to_another_is_not_revived(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        self.let_expire(store)
        store.acquire(claim("b"))

        answers = store.renew([claim("a")], 1.0)

        assert answers == [Answer.TAKEN]
        assert tokens(store.holders(KEY)) == ["b"]

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_lock_that_another_had_in_between_is_not_revived(self, store: Store, limit: int) -> None:
        store.acquire(claim("a", limit=limit, ttl=SHORT))
        self.let_expire(store)
        store.acquire(claim("b", limit=limit))
        store.release(claim("b", limit=limit), 1)

        answers = store.renew([claim("a", limit=limit)], 1.0)

        assert answers == [Answer.GONE]
        assert store.holders(KEY) == []
        granted(store.acquire(claim("c", limit=limit)))

    def test_a_lock_whose_data_the_store_has_lost_is_not_revived(
        self, store: Store, lose_all: Callable[[], object]
    ) -> None:
        store.acquire(claim("a"))
        lose_all()

        answers = store.renew([claim("a")], 1.0)

        assert answers == [Answer.GONE]
        granted(store.acquire(claim("b")))

    def test_renewals_are_answered_one_by_one_in_their_order(self, store: Store) -> None:
        store.acquire(claim("a", key=KEY))
        store.acquire(claim("b", key=OTHER))

        answers = store.renew(
            [
                claim("gone", key="singleton:v1:{nobody:00}"),
                claim("b", key=OTHER),
                claim("stranger", key=KEY),
                claim("a", key=KEY),
            ],
            1.0,
        )

        assert answers == [Answer.GONE, Answer.DONE, Answer.TAKEN, Answer.DONE]

    def test_very_many_renewals_are_answered_in_their_order(self, store: Store) -> None:
        claims = [claim(f"t{number}", key=f"singleton:v1:{{many:{number}}}", ttl=10) for number in range(250)]
        for mine in claims:
            granted(store.acquire(mine))
        strange, gone = {0, 99, 100, 249}, {1, 101, 248}
        for number in gone:
            store.release(claims[number], 1)
        renewals = [
            claim("stranger" if number in strange else mine.token, key=mine.key, ttl=30)
            for number, mine in enumerate(claims)
        ]

        answers = store.renew(renewals, 1.0)

        expected = {**dict.fromkeys(strange, Answer.TAKEN), **dict.fromkeys(gone, Answer.GONE)}
        assert answers == [expected.get(number, Answer.DONE) for number in range(250)]
        assert store.holders(claims[247].key)[0].expires_in > 10

    # Successors.

    def test_the_first_who_wants_a_rerun_is_next_and_runs_with_the_newest_arguments(self, store: Store) -> None:
        store.acquire(claim("a"))
        first, later, latest = rerun("b", "of b"), rerun("c", "of c"), rerun("d", "of d")

        for wanted in (first, later, latest):
            assert refused(store.acquire(wanted)).successor == "b"
        store.release(claim("a"), 1)

        assert refused(store.acquire(claim("stranger"))).first.task_id == "b"
        grant = granted(store.acquire(again(first, 1)))
        assert grant.arguments == "of d"
        assert granted(store.acquire(again(first, 1))).arguments == "of d", "a lost reply costs no arguments"
        store.release(first, grant.place)
        assert granted(store.acquire(claim("e"))).arguments == ""

    def test_a_successor_that_asks_again_keeps_what_others_left(self, store: Store) -> None:
        store.acquire(claim("a"))
        asked = refused(store.acquire(rerun("b", "of b"))).at
        store.acquire(rerun("c", "of c"))

        assert refused(store.acquire(again(rerun("b"), asked))).successor == "b"
        store.release(claim("a"), 1)

        assert granted(store.acquire(again(rerun("b"), asked))).arguments == "of c"

    def test_a_successor_gives_way_to_somebody_who_came_after_it(self, store: Store) -> None:
        store.acquire(claim("a"))
        asked = refused(store.acquire(rerun("b", "of b"))).at
        store.release(claim("a"), 1)
        store.release(claim("b"), 1)
        granted(store.acquire(replace("c")))

        assert refused(store.acquire(again(rerun("b"), asked))).successor is None

    def test_a_holder_that_is_replaced_hears_of_it_and_holds_until_it_lets_go(self, store: Store) -> None:
        store.acquire(claim("a"))

        assert refused(store.acquire(replace("b"))).successor == "b"
        assert store.renew([claim("a")], 1.0) == [Answer.REPLACED]
        assert tokens(store.holders(KEY)) == ["a"]
        assert (store.remaining([claim("a")], 1.0)[0] or 0) > 25
        assert granted(store.acquire(claim("a"))).place == 1
        assert store.successor(KEY) == "b"
        assert refused(store.acquire(again(replace("b"), 1))).first.token == "a"
        assert store.release(claim("a"), 1) is Answer.DONE
        granted(store.acquire(again(replace("b"), 1)))
        assert store.renew([claim("b")], 1.0) == [Answer.DONE]
        assert store.successor(KEY) is None

    def test_the_last_who_replaces_is_next(self, store: Store) -> None:
        store.acquire(claim("a"))
        asked = refused(store.acquire(replace("b"))).at

        assert refused(store.acquire(replace("c"))).successor == "c"
        assert refused(store.acquire(again(replace("b"), asked))).successor == "c"
        store.release(claim("a"), 1)
        assert refused(store.acquire(again(replace("b"), asked))).first.task_id == "c"
        granted(store.acquire(again(replace("c"), asked)))
        assert refused(store.acquire(again(replace("b"), asked))).successor is None
        assert store.renew([claim("c")], 1.0) == [Answer.DONE]

    # Calls that are unique in the queue.

    def test_of_several_calls_one_is_queued_and_the_others_learn_which(self, store: Store) -> None:
        assert publish(store, "a") is None
        assert [published(publish(store, other)).task_id for other in ("b", "c")] == ["a", "a"]
        assert publish(store, "a") is None, "a lost reply costs no call"
        granted(store.acquire(claim("member", task_id="member")))
        assert publish(store, "a", counts_running=True) is None, "nor does a run that has begun meanwhile"
        assert published(publish(store, "b", counts_running=True)).task_id == "a"

    def test_the_queued_call_is_queued_no_more_once_it_runs(self, store: Store) -> None:
        publish(store, "a")
        granted(store.acquire(queued_claim("a")))

        assert publish(store, "b") is None
        assert published(publish(store, "c", counts_running=True)).task_id == "b"
        store.withdraw(KEY, "b")
        assert published(publish(store, "c", counts_running=True)).task_id == "a"
        store.release(queued_claim("a"), 1)
        assert publish(store, "c", counts_running=True) is None

    def test_a_queued_call_survives_the_release_of_another_run(self, store: Store) -> None:
        granted(store.acquire(claim("a", task_id="a")))
        publish(store, "b")
        store.release(claim("a"), 1)

        assert published(publish(store, "c")).task_id == "b"
        assert refused(store.acquire(queued_claim("c"))).first.task_id == "b"
        granted(store.acquire(claim("other", task_id="other")))

    def test_a_call_whose_publishing_failed_leaves_nothing(self, store: Store) -> None:
        publish(store, "a", quiet=30)
        store.withdraw(KEY, "a", afresh=True)

        assert publish(store, "b") is None

    def test_a_key_that_is_quiet_is_published_no_more_though_its_call_has_ended(self, store: Store) -> None:
        publish(store, "a", quiet=30)
        grant = granted(store.acquire(queued_claim("a")))
        store.release(queued_claim("a"), grant.place)

        assert published(publish(store, "b")).task_id == "a"

    def test_a_mark_outlives_runs_that_are_none_of_its(self, store: Store) -> None:
        # A member of a canvas and a retry are always sent, and run.
        publish(store, "a", quiet=30)
        store.withdraw(KEY, "a")
        for name in ("a", "member", "retry"):
            run = claim(name, ttl=SHORT, task_id=name)
            store.release(run, granted(store.acquire(run)).place)

        self.pass_time(2.5 * SHORT)
        assert published(publish(store, "b")).task_id == "a"
        self.pass_time(1 * SHORT)
        assert publish(store, "b") is None

    # Slots of a beat.

    def test_a_slot_is_claimed_until_it_was_sent(self, store: Store) -> None:
        slot = Slot("entry", due=1_000_000, fence=5)
        assert store.claim_slot(SLOTS, slot)
        assert store.claim_slot(SLOTS, dataclasses.replace(slot, fence=6)), "the heir sends what was not sent"
        assert store.claim_slot(SLOTS, dataclasses.replace(slot, fence=6, sent=1_000_100))

        assert not store.claim_slot(SLOTS, dataclasses.replace(slot, fence=7))
        assert store.claim_slot(SLOTS, Slot("entry", due=3_000_000, fence=7))
        assert store.claim_slot(SLOTS, dataclasses.replace(slot, entry="other", fence=7))
        assert store.slots(SLOTS)["entry"] == Slot("entry", 3_000_000, 7, sent=1_000_100)

    def test_who_led_before_claims_and_notes_nothing_any_more(self, store: Store) -> None:
        store.claim_slot(SLOTS, Slot("entry", due=1_000_000, fence=6))

        assert not store.claim_slot(SLOTS, Slot("entry", due=3_000_000, fence=5))
        assert not store.claim_slot(SLOTS, Slot("entry", due=1_000_000, fence=5, sent=1_000_100))
        assert store.slots(SLOTS)["entry"].sent == 0

    def test_each_claim_is_told_how_long_it_lasts_without_a_renewal(self, store: Store) -> None:
        store.acquire(claim("a", ttl=30))
        store.acquire(claim("b", ttl=60, key=OTHER))

        first, second, stranger, nobody = store.remaining(
            [claim("a"), claim("b", key=OTHER), claim("stranger"), claim("a", key=f"{KEY}-not-held")], 1.0
        )

        assert (stranger, nobody) == (None, None)
        assert 25 < (first or 0) <= 30
        assert 55 < (second or 0) <= 60

    def test_what_a_twin_does_the_other_sees(self, store: Store) -> None:
        granted(store.twin().acquire(claim("a")))
        assert store.twin().release(claim("a"), 1) is Answer.DONE
        granted(store.acquire(claim("b")))

    def test_no_renewals_have_no_answers(self, store: Store) -> None:
        assert store.renew([], 1.0) == []

    # Expiry.

    def test_an_expired_lock_is_granted_to_the_next(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))

        self.let_expire(store)

        grant = granted(store.acquire(claim("b")))
        assert tokens(store.holders(KEY)) == ["b"]
        assert grant.took_over

    def test_a_lock_is_not_granted_before_its_deadline(self, store: Store) -> None:
        asked_at = self.now()
        granted(store.acquire(claim("a", ttl=SHORT)))

        for _ in range(200):
            if isinstance(store.acquire(claim("b")), Grant):
                break
            self.pass_time(0.01 * SHORT)

        assert tokens(store.holders(KEY)) == ["b"]
        assert self.now() >= asked_at + SHORT - CLOCKS_DIFFER_BY

    def test_a_conflict_says_how_long_the_lease_lasts(self, store: Store) -> None:
        store.acquire(claim("a", ttl=10))
        first = refused(store.acquire(claim("b"))).first.expires_in

        self.pass_time(0.2)
        later = refused(store.acquire(claim("b"))).first.expires_in

        assert first - 5 < later <= first - 0.2

    def test_a_successor_of_a_holder_that_released_did_not_take_over(self, store: Store) -> None:
        store.acquire(claim("a"))
        store.release(claim("a"), 1)

        assert not granted(store.acquire(claim("b"))).took_over

    @pytest.mark.parametrize("released", [True, False])
    def test_a_successor_in_one_of_several_places_has_nothing_of_the_holder_before(
        self, store: Store, released: bool
    ) -> None:
        facts = {"task_id": "id-of-a", "task_name": "shop.a", "hostname": "w1@host", "pid": "42", "attempt": "3"}
        store.acquire(claim("a", limit=12, ttl=SHORT, **facts))
        others = [f"t{place}" for place in range(2, 13)]
        for pid, token in enumerate(others):
            store.acquire(claim(token, limit=12, pid=str(pid), hostname=token))
        if released:
            store.release(claim("a", limit=12), 1)
        else:
            self.pass_time(1.2 * SHORT)

        grant = granted(store.acquire(claim("b", limit=12)))

        described = {holder.token: holder for holder in store.holders(KEY)}
        successor = described.pop("b")
        assert grant.place == 1
        assert (successor.task_id, successor.task_name, successor.hostname, successor.pid) == (None, None, None, None)
        assert successor.attempt == 0
        assert {token: (holder.pid, holder.hostname) for token, holder in described.items()} == {
            token: (pid, token) for pid, token in enumerate(others)
        }

    def test_a_successor_has_nothing_of_the_holder_that_died(self, store: Store) -> None:
        facts = {"task_id": "id-of-a", "task_name": "shop.a", "hostname": "w1@host", "pid": "42", "attempt": "3"}
        store.acquire(claim("a", ttl=SHORT, **facts))
        self.let_expire(store)

        store.acquire(claim("b"))

        (holder,) = store.holders(KEY)
        assert holder.token == "b"
        assert (holder.task_id, holder.task_name, holder.hostname, holder.pid) == (None, None, None, None)
        assert holder.attempt == 0

    # Fences.

    def test_each_grant_has_a_greater_fence_than_those_before(
        self, store: Store, lose_all: Callable[[], object]
    ) -> None:
        fences = [granted(store.acquire(claim("a"))).fence]

        store.release(claim("a"), 1)
        fences.append(granted(store.acquire(claim("after-a-release", ttl=SHORT))).fence)
        self.let_expire(store)
        fences.append(granted(store.acquire(claim("after-an-expiry", ttl=SHORT))).fence)
        self.pass_time(3 * SHORT)
        fences.append(granted(store.acquire(claim("after-the-key-is-gone"))).fence)
        for number in range(50):
            store.acquire(claim(f"t{number}", key=OTHER))
            store.release(claim(f"t{number}", key=OTHER), 1)
        lose_all()
        fences.append(granted(store.acquire(claim("after-a-loss-of-all-data"))).fence)

        assert fences == sorted(set(fences))

    def test_fences_grow_however_fast_they_are_given(self, store: Store) -> None:
        fences = []
        for number in range(200):
            fences.append(granted(store.acquire(claim(f"t{number}"))).fence)
            store.release(claim(f"t{number}"), 1)

        assert fences == sorted(set(fences))

    def test_holders_of_one_lock_have_fences_of_their_own(self, store: Store) -> None:
        fences = [granted(store.acquire(claim(f"t{number}", limit=20))).fence for number in range(20)]

        assert fences == sorted(set(fences))

    # More than one place.

    def test_as_many_as_the_limit_hold_a_lock(self, store: Store) -> None:
        grants = [granted(store.acquire(claim(token, limit=3))) for token in "abc"]

        conflict = refused(store.acquire(claim("d", limit=3)))

        assert [grant.place for grant in grants] == [1, 2, 3]
        assert tokens(conflict.holders) == tokens(store.holders(KEY)) == ["a", "b", "c"]

    def test_a_released_place_is_given_to_the_next(self, store: Store) -> None:
        for token in "abc":
            store.acquire(claim(token, limit=3))

        store.release(claim("b", limit=3), 2)

        assert granted(store.acquire(claim("d", limit=3))).place == 2
        assert tokens(store.holders(KEY)) == ["a", "c", "d"]
        refused(store.acquire(claim("e", limit=3)))

    def test_each_holder_has_a_deadline_of_its_own(self, store: Store) -> None:
        store.acquire(claim("long", limit=3, ttl=30))
        store.acquire(claim("short", limit=3, ttl=SHORT))
        store.acquire(claim("longer", limit=3, ttl=60))

        self.pass_time(1.5 * SHORT)

        assert [holder.token for holder in store.holders(KEY)] == ["long", "longer"]
        grant = granted(store.acquire(claim("newcomer", limit=3)))
        assert (grant.place, grant.took_over) == (2, True)
        assert store.renew([claim("long", limit=3), claim("short", limit=3)], 1.0) == [
            Answer.DONE,
            Answer.TAKEN,
        ]

    def test_a_short_holder_does_not_shorten_a_long_one(self, store: Store) -> None:
        store.acquire(claim("long", limit=2, ttl=10 * SHORT))
        store.acquire(claim("short", limit=2, ttl=SHORT))
        store.renew([claim("short", limit=2, ttl=SHORT)], 1.0)

        self.pass_time(3 * SHORT)

        assert tokens(store.holders(KEY)) == ["long"]

    def test_a_long_holder_that_leaves_does_not_take_a_short_one_with_it(self, store: Store) -> None:
        store.acquire(claim("long", limit=2, ttl=30))
        store.acquire(claim("short", limit=2, ttl=5))

        store.release(claim("long", limit=2), 1)

        assert tokens(store.holders(KEY)) == ["short"]
        assert store.renew([claim("short", limit=2)], 1.0) == [Answer.DONE]

    def test_a_conflict_puts_the_holder_first_that_ends_first(self, store: Store) -> None:
        for token, ttl in [("a", 30), ("b", 10), ("c", 20)]:
            store.acquire(claim(token, limit=3, ttl=ttl))

        conflict = refused(store.acquire(claim("d", limit=3)))

        assert conflict.first.token == "b"
        assert [holder.token for holder in conflict.holders] == ["b", "c", "a"]
        assert [holder.token for holder in store.holders(KEY)] == ["b", "c", "a"]

    @pytest.mark.parametrize(("held", "wanted"), [(1, 3), (3, 1), (3, 2)])
    def test_a_lock_that_is_held_under_another_limit_is_an_error_that_names_both(
        self, store: Store, held: int, wanted: int
    ) -> None:
        store.acquire(claim("a", limit=held))

        with pytest.raises(ConfigurationError) as error:
            store.acquire(claim("b", limit=wanted))

        assert f"lock_limit={held}" in str(error.value)
        assert f"lock_limit={wanted}" in str(error.value)
        assert KEY in str(error.value)
        assert tokens(store.holders(KEY)) == ["a"]

    @pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
    def test_a_lock_that_nobody_holds_any_more_may_have_another_limit(
        self, store: Store, before: int, after: int
    ) -> None:
        fence = granted(store.acquire(claim("dead", limit=before, ttl=SHORT))).fence
        self.let_expire(store)

        grants = [granted(store.acquire(claim(f"t{number}", limit=after))) for number in range(after)]

        assert [grant.place for grant in grants] == list(range(1, after + 1))
        assert all(grant.fence > fence for grant in grants)
        refused(store.acquire(claim("one-more", limit=after)))

    @pytest.mark.parametrize("limit", [1, 3])
    def test_a_crowd_never_exceeds_the_limit(self, store: Store, limit: int) -> None:
        inside, most, turns = 0, 0, 0
        guard = threading.Lock()

        def take_turns(name: int) -> None:
            nonlocal inside, most, turns
            for turn in range(40):
                mine = claim(f"{name}-{turn}", limit=limit)
                answer = store.acquire(mine)
                if isinstance(answer, Grant):
                    with guard:
                        inside, turns = inside + 1, turns + 1
                        most = max(most, inside)
                    time.sleep(0)  # let others try
                    with guard:
                        inside -= 1
                    assert store.release(mine, answer.place) is Answer.DONE

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(take_turns, range(8)))

        assert most <= limit
        assert turns >= limit
        assert store.holders(KEY) == []

    # The queue.

    def test_a_free_lock_is_granted_to_a_waiter_at_once(self, store: Store) -> None:
        with store.waiter(claim("w")) as waiter:
            grant = granted(waiter.ask())

        assert (grant.place, grant.took_over) == (1, False)
        assert tokens(store.holders(KEY)) == ["w"]

    def test_a_waiter_is_told_how_long_to_sleep_at_most(self, store: Store) -> None:
        store.acquire(claim("a", ttl=5))

        with store.waiter(claim("w")) as waiter:
            wait = queued(waiter.ask())

        assert 0 < wait <= 5
        assert tokens(store.holders(KEY)) == ["a"]

    def test_a_waiter_may_be_the_one_with_the_shorter_ttl(self, store: Store) -> None:
        store.acquire(claim("a", ttl=300))

        with store.waiter(claim("w", ttl=5)) as waiter:
            assert 0 < queued(waiter.ask()) <= 5

    def test_a_waiter_sleeps_until_the_first_of_several_holders_may_be_gone(self, store: Store) -> None:
        store.acquire(claim("long", limit=2, ttl=20))
        store.acquire(claim("short", limit=2, ttl=5))

        with store.waiter(claim("w", limit=2)) as waiter:
            assert 0 < queued(waiter.ask()) <= 5

    def test_a_waiter_gets_the_lock_once_it_is_released(self, store: Store) -> None:
        before = granted(store.acquire(claim("a")))
        with store.waiter(claim("w", task_id="id-of-w", hostname="w1@host")) as waiter:
            queued(waiter.ask())
            store.release(claim("a"), 1)

            grant = granted(waiter.ask())

        (holder,) = store.holders(KEY)
        assert (holder.token, holder.task_id, holder.hostname) == ("w", "id-of-w", "w1@host")
        assert grant.fence > before.fence
        assert not grant.took_over

    def test_a_waiter_gets_the_lock_once_its_holder_is_dead(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with store.waiter(claim("w")) as waiter:
            queued(waiter.ask())
            self.let_expire(store)

            assert granted(waiter.ask()).took_over

    def test_waiters_are_served_in_the_order_of_their_arrival(self, store: Store) -> None:
        store.acquire(claim("a"))
        served = ["a"]
        with self.waiting(store, "w1", "w2", "w3") as waiters:
            while waiters:
                store.release(claim(served[-1]), 1)
                answers = {token: waiters[token].ask() for token in sorted(waiters, reverse=True)}
                granted_to = [token for token, answer in answers.items() if isinstance(answer, Grant)]
                assert len(granted_to) == 1
                served += granted_to
                del waiters[granted_to[0]]

        assert served == ["a", "w1", "w2", "w3"]

    def test_asking_again_keeps_the_turn(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2") as waiters:
            for token in ["w1", "w2", "w1"]:
                queued(waiters[token].ask())

            store.release(claim("a"), 1)

            queued(waiters["w2"].ask())
            granted(waiters["w1"].ask())

    def test_asking_again_after_the_grant_is_the_same_grant(self, store: Store) -> None:
        with store.waiter(claim("w")) as waiter:
            first, again = granted(waiter.ask()), granted(waiter.ask())

        assert (again.place, again.fence, again.since) == (first.place, first.fence, first.since)
        assert tokens(store.holders(KEY)) == ["w"]

    def test_a_newcomer_does_not_overtake_a_waiter_and_is_told_of_it(self, store: Store) -> None:
        store.acquire(claim("a"))
        with store.waiter(claim("w", task_id="id-of-w")) as waiter:
            queued(waiter.ask())
            store.release(claim("a"), 1)

            conflict = refused(store.acquire(claim("newcomer")))

            assert (conflict.first.token, conflict.first.task_id) == ("w", "id-of-w")
            assert conflict.first.expires_in > 0
            granted(waiter.ask())

    def test_a_conflict_names_the_holders_or_where_there_are_none_the_waiters_in_turn(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w2", "w1", "w3"):
            while_held = refused(store.acquire(claim("newcomer")))
            store.release(claim("a"), 1)
            while_free = refused(store.acquire(claim("newcomer")))

        assert [holder.token for holder in while_held.holders] == ["a"]
        assert [holder.token for holder in while_free.holders] == ["w2", "w1", "w3"]
        assert store.holders(KEY) == []

    def test_a_refused_newcomer_has_no_turn(self, store: Store) -> None:
        store.acquire(claim("a"))
        refused(store.acquire(claim("b")))

        assert store.release(claim("b"), None) is Answer.TAKEN
        store.release(claim("a"), 1)
        granted(store.acquire(claim("c")))

    @pytest.mark.parametrize("its_turn_has_come", [True, False])
    def test_a_waiter_that_gives_up_passes_its_turn_on(self, store: Store, its_turn_has_come: bool) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2") as waiters:
            if its_turn_has_come:
                store.release(claim("a"), 1)
                answer = store.release(claim("w1"), None)
            else:
                answer = store.release(claim("w1"), None)
                store.release(claim("a"), 1)

            assert answer is Answer.DONE
            granted(waiters["w2"].ask())

    def test_a_waiter_in_the_middle_that_gives_up_is_in_nobodys_way(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2", "w3") as waiters:
            store.release(claim("w2"), None)
            store.release(claim("a"), 1)
            granted(waiters["w1"].ask())
            store.release(claim("w1"), 1)

            granted(waiters["w3"].ask())

    def test_a_waiter_that_has_been_served_is_in_nobodys_way(self, store: Store) -> None:
        for token in "ab":
            store.acquire(claim(token, limit=2))
        with self.waiting(store, "w", limit=2) as waiters:
            queued(waiters["w"].ask())
            queued(waiters["w"].ask())
            store.release(claim("a", limit=2), 1)
            granted(waiters["w"].ask())

            store.release(claim("b", limit=2), 2)

            granted(store.acquire(claim("newcomer", limit=2)))

    def test_the_last_waiter_that_gives_up_leaves_a_free_lock(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w"):
            store.release(claim("a"), 1)

            assert store.release(claim("w"), None) is Answer.DONE

        assert not granted(store.acquire(claim("b"))).took_over

    def test_a_waiter_that_gave_up_has_no_turn_any_more(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2") as waiters:
            store.release(claim("w1"), None)

            again = store.release(claim("w1"), None)
            queued(waiters["w1"].ask())  # a new turn, behind the other
            store.release(claim("a"), 1)

            assert again is Answer.TAKEN
            queued(waiters["w1"].ask())
            granted(waiters["w2"].ask())

    def test_a_waiter_that_dies_is_passed_over(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with self.waiting(store, "dead", "w") as waiters:
            self.let_expire(store)
            wait = queued(waiters["w"].ask())
            refused(store.acquire(claim("newcomer")))

            self.pass_time(wait + 0.01)

            assert wait <= LATE
            refused(store.acquire(claim("newcomer")))
            granted(waiters["w"].ask())
            assert store.release(claim("w"), 1) is Answer.DONE
        granted(store.acquire(claim("newcomer")))

    def test_waiters_get_as_many_places_as_are_free(self, store: Store) -> None:
        for token in "ab":
            store.acquire(claim(token, limit=2))
        with self.waiting(store, "w1", "w2", "w3", limit=2) as waiters:
            for place, token in enumerate("ab", start=1):
                store.release(claim(token, limit=2), place)

            queued(waiters["w3"].ask())
            places = {granted(waiters[token].ask()).place for token in ["w2", "w1"]}
            queued(waiters["w3"].ask())

            assert places == {1, 2}
            store.release(claim("w2", limit=2), None)
            granted(waiters["w3"].ask())
        assert tokens(store.holders(KEY)) == ["w1", "w3"]

    def test_newcomers_may_have_the_places_that_the_waiters_leave_over(self, store: Store) -> None:
        for token in "abc":
            store.acquire(claim(token, limit=3))
        with self.waiting(store, "w", limit=3) as waiters:
            store.release(claim("b", limit=3), 2)
            refused(store.acquire(claim("n1", limit=3)))
            store.release(claim("a", limit=3), 1)

            granted(store.acquire(claim("n1", limit=3)))
            refused(store.acquire(claim("n2", limit=3)))
            granted(waiters["w"].ask())

        assert tokens(store.holders(KEY)) == ["c", "n1", "w"]

    def test_a_lock_that_somebody_waits_for_keeps_its_limit(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w") as waiters:
            with pytest.raises(ConfigurationError, match="lock_limit=2"), store.waiter(claim("v", limit=2)) as other:
                other.ask()
            store.release(claim("a"), 1)

            with pytest.raises(ConfigurationError, match="lock_limit=2"):
                store.acquire(claim("b", limit=2))

            granted(waiters["w"].ask())

    def test_a_release_that_comes_before_the_sleep_wakes_all_the_same(self, store: Store) -> None:
        store.acquire(claim("a"))
        with store.waiter(claim("w")) as waiter:
            queued(waiter.ask())
            store.release(claim("a"), 1)
            asleep_at = clock()

            waiter.sleep(3)

            assert clock() - asleep_at < 1.5
            granted(waiter.ask())

    def test_a_release_wakes_the_first_waiter(self, store: Store) -> None:
        store.acquire(claim("a"))
        with store.waiter(claim("w")) as waiter:
            queued(waiter.ask())
            releasing = threading.Timer(0.2, store.release, (claim("a"), 1))
            releasing.start()
            asleep_at = clock()

            waiter.sleep(20)

            assert clock() - asleep_at < 10
            releasing.join()
            granted(waiter.ask())

    def test_a_waiter_that_nobody_wakes_wakes_by_itself(self, store: Store) -> None:
        store.acquire(claim("a"))
        with store.waiter(claim("w")) as waiter:
            queued(waiter.ask())
            asleep_at = clock()

            waiter.sleep(0.1)

            assert 0.09 < clock() - asleep_at < 5

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_crowd_that_waits_is_served_to_the_last_and_never_exceeds_the_limit(
        self, store: Store, limit: int
    ) -> None:
        inside, most, served = 0, 0, 0
        guard, give_up_at = threading.Lock(), clock() + 30

        def wait_for_turns(name: int) -> None:
            nonlocal inside, most, served
            for turn in range(8):
                mine = claim(f"{name}-{turn}", limit=limit)
                with store.waiter(mine) as waiter:
                    while not isinstance(answer := waiter.ask(), Grant):
                        assert clock() < give_up_at, f"{mine.token} is not served"
                        waiter.sleep(min(answer, 0.2))
                with guard:
                    inside, served = inside + 1, served + 1
                    most = max(most, inside)
                time.sleep(0)  # let others try
                with guard:
                    inside -= 1
                assert store.release(mine, answer.place) is Answer.DONE

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(wait_for_turns, range(6)))

        assert most <= limit
        assert served == 6 * 8
        granted(store.acquire(claim("afterwards", limit=limit)))

    # Places that stay taken.

    def test_a_place_stays_taken_for_as_long_as_it_is_to_be_held_at_least(self, store: Store) -> None:
        mine = claim("a", min_hold=2 * SHORT, task_id="id-of-a")
        asked_at = self.now()
        grant = granted(store.acquire(mine))

        answer = store.release(mine, 1)
        conflict = refused(store.acquire(claim("b")))
        self.let_expire(store)

        assert answer is Answer.DONE
        assert (conflict.first.task_id, conflict.first.fence) == ("id-of-a", grant.fence)
        assert 0 < conflict.first.expires_in <= 2 * SHORT
        assert not granted(store.acquire(claim("b"))).took_over
        assert self.now() >= asked_at + 2 * SHORT - CLOCKS_DIFFER_BY

    def test_a_place_may_stay_taken_for_longer_than_its_lease_would_have_lasted(self, store: Store) -> None:
        mine = claim("a", ttl=SHORT, min_hold=10 * SHORT)
        store.acquire(mine)
        store.release(mine, 1)

        self.pass_time(5 * SHORT)

        assert refused(store.acquire(claim("b"))).first.expires_in > 4 * SHORT

    def test_a_place_that_was_held_long_enough_is_free_at_once(self, store: Store) -> None:
        mine = claim("a", min_hold=SHORT)
        store.acquire(mine)
        self.pass_time(SHORT)

        store.release(mine, 1)

        assert store.holders(KEY) == []
        granted(store.acquire(claim("b")))

    def test_a_holder_that_dies_does_not_hold_its_place_any_longer(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT, min_hold=30.0))
        self.let_expire(store)

        assert granted(store.acquire(claim("b"))).took_over

    @pytest.mark.parametrize("token", ["a", "b"])
    def test_a_place_that_stays_taken_can_be_neither_renewed_nor_released(self, store: Store, token: str) -> None:
        store.acquire(claim("a", min_hold=30.0))
        store.release(claim("a", min_hold=30.0), 1)

        renewed = store.renew([claim(token)], 1.0)
        released = [store.release(claim(token), place) for place in (1, None)]

        assert renewed == [Answer.TAKEN]
        assert released == [Answer.TAKEN, Answer.TAKEN]
        refused(store.acquire(claim("c")))

    def test_one_place_that_stays_taken_leaves_the_others_alone(self, store: Store) -> None:
        long, short = claim("long", limit=2, min_hold=30.0), claim("short", limit=2)
        for mine in [long, short]:
            place = granted(store.acquire(mine)).place
            store.release(mine, place)

        grant = granted(store.acquire(claim("newcomer", limit=2)))

        assert (grant.place, grant.took_over) == (2, False)
        assert len(refused(store.acquire(claim("one-more", limit=2))).holders) == 2

    def test_a_waiter_is_told_when_a_place_that_stays_taken_is_free(self, store: Store) -> None:
        mine = claim("a", min_hold=2 * SHORT)
        store.acquire(mine)
        with store.waiter(claim("w")) as waiter:
            queued(waiter.ask())
            store.release(mine, 1)
            asleep_at = clock()
            waiter.sleep(3)
            awake_after = clock() - asleep_at

            wait = queued(waiter.ask())
            self.pass_time(wait + 0.01)

            assert awake_after < 1.5
            assert wait <= 2 * SHORT
            assert not granted(waiter.ask()).took_over

    # Holders.

    def test_nobody_holds_a_lock_that_nobody_took(self, store: Store) -> None:
        assert store.holders(KEY) == []

    def test_a_holder_is_described_as_it_described_itself(self, store: Store) -> None:
        grant = granted(
            store.acquire(
                claim("a", task_id="id-of-a", task_name="shop.tasks.other", hostname="w1@höst", pid="42", attempt="3")
            )
        )

        (holder,) = store.holders(KEY)

        assert (holder.key, holder.token, holder.fence) == (KEY, "a", grant.fence)
        assert (holder.task_id, holder.task_name) == ("id-of-a", "shop.tasks.other")
        assert (holder.hostname, holder.pid, holder.attempt) == ("w1@höst", 42, 3)
        assert 0 <= holder.age < 60

    def test_a_task_that_gives_no_name_has_that_of_the_lock(self, store: Store) -> None:
        store.acquire(claim("a", task_id="id-of-a"))

        assert store.holders(KEY)[0].task_name == "shop.tasks.sync"

    def test_a_holder_that_is_no_task_has_no_name(self, store: Store) -> None:
        store.acquire(claim("a"))

        (holder,) = store.holders(KEY)

        assert (holder.task_id, holder.task_name, holder.hostname, holder.pid) == (None, None, None, None)
        assert holder.attempt == 0


class TestMemoryStore(StoreContract):
    """The contract, on a clock of its own."""

    @pytest.fixture(autouse=True)
    def clock_starts(self) -> None:
        self.time = time.time()

    @pytest.fixture
    def store(self) -> MemoryStore:  # type: ignore[override]
        return MemoryStore(self.now)

    @pytest.fixture
    def lose_all(self, store: MemoryStore) -> Callable[[], object]:  # type: ignore[override]
        return store.clear

    def now(self) -> float:
        self.time += 2e-6
        return self.time

    def pass_time(self, seconds: float) -> None:
        self.time += seconds

    def test_a_lease_ends_when_its_ttl_is_over_and_not_before(self, store: MemoryStore) -> None:
        grant = granted(store.acquire(claim("a", ttl=10.0)))

        self.time = grant.since + 9.999
        refused(store.acquire(claim("b")))
        self.time = grant.since + 10.001

        assert granted(store.acquire(claim("b"))).took_over

    def test_a_place_stays_taken_to_the_moment(self, store: MemoryStore) -> None:
        mine = claim("a", min_hold=10.0)
        grant = granted(store.acquire(mine))
        store.release(mine, 1)

        self.time = grant.since + 9.999
        refused(store.acquire(claim("b")))
        self.time = grant.since + 10.001

        assert not granted(store.acquire(claim("b"))).took_over

    def test_a_waiter_may_be_so_late_for_its_turn_and_not_later(self, store: MemoryStore) -> None:
        turn_comes_at = granted(store.acquire(claim("a", ttl=10.0))).since + 10.0
        with self.waiting(store, "late"):
            self.time = turn_comes_at + LATE - 0.001
            refused(store.acquire(claim("b")))
            self.time = turn_comes_at + LATE + 0.001

            granted(store.acquire(claim("b")))

    def test_fences_grow_even_while_the_clock_stands_still(self) -> None:
        moment = time.time()
        store = MemoryStore(lambda: moment)

        fences = []
        for token in "abc":
            fences.append(granted(store.acquire(claim(token))).fence)
            store.release(claim(token), 1)

        assert fences == sorted(set(fences))


class TestRedisStore(StoreContract):
    """The contract, on each server, and what only a server has: keys."""

    @pytest.fixture
    def store(self, server: Server) -> Iterator[Store]:  # type: ignore[override]
        store = RedisStore(server.url, {})
        yield store
        store.close()

    @pytest.fixture
    def client(self, server: Server) -> Iterator[Any]:
        with server.client() as client:
            yield client

    @pytest.fixture
    def lose_all(self, client: "redis.Redis") -> Callable[[], object]:
        return client.flushall

    @pytest.fixture(autouse=True)
    def ageing(self, client: Any) -> None:
        self.client, self.passed = client, 0.0

    def now(self) -> float:
        return clock() + self.passed

    def pass_time(self, seconds: float) -> None:
        StandingClock(self.client).advance(seconds)
        self.passed += seconds

    def test_a_lease_ends_by_the_servers_own_clock(self, store: Store) -> None:
        asked_at = clock()
        store.acquire(claim("a", ttl=REAL))
        refused(store.acquire(claim("b")))

        until(lambda: isinstance(store.acquire(claim("b")), Grant), "the lease has ended")

        assert clock() >= asked_at + REAL - CLOCKS_DIFFER_BY
        assert tokens(store.holders(KEY)) == ["b"]

    def test_a_waiter_that_sleeps_as_long_as_it_was_told_finds_a_dead_holders_place(self, store: Store) -> None:
        asked_at = clock()
        store.acquire(claim("a", ttl=REAL))
        with store.waiter(claim("w")) as waiter:
            waiter.sleep(queued(waiter.ask()))

            until(lambda: isinstance(waiter.ask(), Grant), "it is granted", timeout=REAL)

        assert clock() >= asked_at + REAL - CLOCKS_DIFFER_BY

    def test_a_lock_is_one_key(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", limit=3))
        store.acquire(claim("b", limit=3))

        assert client.keys() == [KEY]

    def test_a_released_lock_leaves_no_key(self, store: Store, client: Any) -> None:
        store.acquire(claim("a"))

        store.release(claim("a"), 1)

        assert client.keys() == []

    @pytest.mark.parametrize("order", ["abc", "cba", "bac"])
    def test_the_last_of_several_holders_leaves_no_key(self, store: Store, client: Any, order: str) -> None:
        places = {token: granted(store.acquire(claim(token, limit=3))).place for token in "abc"}

        left = []
        for token in order:
            store.release(claim(token, limit=3), places[token])
            left.append(client.exists(KEY))

        assert left == [1, 1, 0]

    @pytest.mark.parametrize("limit", [1, 2])
    def test_every_key_expires_at_all_times(self, store: Store, client: Any, limit: int) -> None:
        steps: list[Callable[[], Any]] = [
            lambda: store.acquire(claim("a", limit=limit)),
            lambda: store.acquire(claim("a", limit=limit)),
            lambda: store.renew([claim("a", limit=limit)], 1.0),
            lambda: store.acquire(claim("b", limit=limit, ttl=5)),
            lambda: store.renew([claim("b", limit=limit, ttl=5)], 1.0),
            lambda: store.acquire(claim("c", limit=limit)),
            lambda: store.release(claim("c", limit=limit), None),
            lambda: store.release(claim("a", limit=limit), 1),
        ]

        seen = 0
        for step in steps:
            step()
            for key in client.scan_iter():
                seen += 1
                assert 0 < client.pttl(key) <= 60_000

        assert seen >= len(steps) - 1

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_key_that_somebody_waits_for_expires_at_all_times_too(
        self, store: Store, client: Any, limit: int
    ) -> None:
        long, short = claim("long", limit=limit, min_hold=5.0), claim("short", limit=limit, ttl=5)
        with store.waiter(claim("w1", limit=limit)) as first, store.waiter(claim("w2", limit=limit)) as second:
            steps: list[Callable[[], Any]] = [
                lambda: [store.acquire(mine) for mine in [long, short]],
                first.ask,
                second.ask,
                lambda: store.renew([long, short], 1.0),
                lambda: store.release(short, None),
                lambda: store.release(long, 1),
                first.ask,
                lambda: store.release(claim("w1", limit=limit), None),
                second.ask,
            ]
            for step in steps:
                step()
                assert client.keys() == [KEY]
                assert 0 < client.pttl(KEY) <= 60_000

    def test_a_key_with_nobody_but_waiters_expires_and_not_before_their_turns(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", ttl=1.0))
        with self.waiting(store, "w"):
            store.release(claim("a"), 1)

            assert store.holders(KEY) == []
            assert 1000 * (0.5 + LATE) < client.pttl(KEY) <= 60_000

    def test_a_lock_that_somebody_waited_for_leaves_no_key(self, store: Store, client: Any) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2") as waiters:
            store.release(claim("a"), 1)
            granted(waiters["w1"].ask())
            store.release(claim("w1"), 1)
            granted(waiters["w2"].ask())

        store.release(claim("w2"), 1)

        assert client.keys() == []

    def test_an_empty_queue_leaves_no_fields(self, store: Store, client: Any) -> None:
        for token in "ab":
            store.acquire(claim(token, limit=2))
        before = set(client.hkeys(KEY))
        with self.waiting(store, "w1", "w2", limit=2):
            store.release(claim("w1", limit=2), None)
            store.release(claim("w2", limit=2), None)

        assert set(client.hkeys(KEY)) == before

    def test_a_released_key_with_a_successor_has_an_expiry(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", ttl=1))
        store.acquire(rerun("b", "of b"))
        store.release(claim("a", ttl=1), 1)

        assert 0 < client.pttl(KEY) <= 30_000

    def test_a_waiter_that_nobody_hears_any_more_is_passed_over_at_the_release(self, store: Store, client: Any) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "dead"):
            pass
        channel = f"{KEY}:dead"
        with self.waiting(store, "w") as waiters:
            until(lambda: client.pubsub_numsub(channel) == [(channel, 0)], "the server knows that it is gone")

            store.release(claim("a"), 1)

            refused(store.acquire(claim("newcomer")))
            granted(waiters["w"].ask())

    def test_waiters_that_nobody_hears_any_more_leave_no_key(self, store: Store, client: Any) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "dead1", "dead2"):
            pass
        until(lambda: not client.pubsub_channels("singleton:*"), "the server knows that they are gone")

        store.release(claim("a"), 1)

        assert client.keys() == []

    def test_a_waiter_listens_on_one_connection_and_closes_it(self, store: Store, client: Any) -> None:
        store.acquire(claim("a"))

        with self.waiting(store, "w"):
            during = client.pubsub_channels("singleton:*")

        assert during == [f"{KEY}:w"]
        until(lambda: not client.pubsub_channels("singleton:*"), "the connection is closed")

    def test_a_waiter_whose_connection_has_died_listens_again(self, store: Store, client: Any) -> None:
        store.acquire(claim("a"))
        with store.waiter(claim("w")) as waiter:
            queued(waiter.ask())
            client.client_kill_filter(_type="pubsub")
            asleep_at = clock()
            waiter.sleep(20)
            looked_again_after = clock() - asleep_at
            queued(waiter.ask())
            heard_on = client.pubsub_channels("singleton:*")
            store.release(claim("a"), 1)
            asleep_at = clock()
            waiter.sleep(20)

            assert looked_again_after < 5
            assert heard_on == [f"{KEY}:w"]
            assert clock() - asleep_at < 5
            granted(waiter.ask())

    def test_the_key_of_a_dead_holder_is_gone_two_ttl_after_its_last_renewal(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", ttl=REAL))
        renewed = clock()
        store.renew([claim("a", ttl=REAL)], 1.0)

        until(lambda: not store.holders(KEY), "nobody holds it")
        still_there = client.exists(KEY)
        until(lambda: not client.exists(KEY), "the key is gone")

        assert still_there or clock() > renewed + 2 * REAL
        assert clock() >= renewed + 2 * REAL - CLOCKS_DIFFER_BY

    def test_a_renewal_moves_the_expiry_of_the_key(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", ttl=5))

        store.renew([claim("a", ttl=30)], 1.0)

        assert 50_000 < client.pttl(KEY) <= 60_000

    def test_a_successors_key_does_not_outlive_it_by_the_ttl_of_the_dead(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", ttl=SHORT))
        client.pexpire(KEY, 600_000)
        self.let_expire(store)

        store.acquire(claim("b", ttl=5))

        assert client.pttl(KEY) <= 10_000

    def test_a_fence_is_the_servers_time_in_microseconds_or_more(self, store: Store, client: Any) -> None:
        seconds, microseconds = client.time()

        grant = granted(store.acquire(claim("a")))

        assert grant.fence >= seconds * 1_000_000 + microseconds

    def test_a_fence_grows_even_where_the_clock_has_gone_back(self, store: Store, client: Any) -> None:
        store.acquire(claim("a", ttl=SHORT))
        from_the_future = 2 * int(client.hget(KEY, "fence"))
        client.hset(KEY, "fence", from_the_future)
        self.let_expire(store)

        assert granted(store.acquire(claim("b"))).fence == from_the_future + 1

    def test_a_key_of_another_kind_is_left_alone(self, store: Store, client: Any) -> None:
        client.set(KEY, "somebody else's")

        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.acquire(claim("a"))

        assert client.get(KEY) == "somebody else's"

    def test_a_held_lock_takes_little_memory(self, store: Store, client: Any) -> None:
        key = "singleton:v1:{shop.tasks.synchronise:9f62a583b84f8227e6432bfe2c555eb2}"
        store.acquire(
            claim(
                "x" * 16,
                key=key,
                task_id="0b0e7a0c-5d5b-4f0c-9d57-8a5d5f9d2f3b",
                hostname="celery@worker-1",
                pid="12345",
            )
        )

        assert client.memory_usage(key) <= 400
