"""To take a lock, and to find it taken."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Answer, Grant
from tests.contract.asking import (
    CLOCKS_DIFFER_BY,
    KEY,
    OTHER,
    SHORT,
    Contract,
    claim,
    granted,
    refused,
    tokens,
)


class Acquire(Contract):
    """To take a lock, and to find it taken."""

    def test_a_free_lock_is_granted(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a")))

        assert grant.place == 1
        assert grant.fence > 0
        assert not grant.took_over

    def test_with_a_limit_of_0_there_is_no_place_even_if_nobody_holds_it(self, store: Store) -> None:
        assert refused(store.acquire(claim("a", limit=0))).holders == ()

        assert store.holders(KEY) == []
        granted(store.acquire(claim("b")))

    def test_a_held_lock_is_refused_naming_the_holder(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a", task_id="id-of-a", hostname="w1@host", pid=42, attempt=3)))

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

    def test_what_a_twin_does_the_other_sees(self, store: Store) -> None:
        granted(store.twin().acquire(claim("a")))
        assert store.twin().release(claim("a"), 1) is Answer.DONE
        granted(store.acquire(claim("b")))

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
        facts = {"task_id": "id-of-a", "task_name": "shop.a", "hostname": "w1@host", "pid": 42, "attempt": 3}
        store.acquire(claim("a", limit=12, ttl=SHORT, **facts))
        others = [f"t{place}" for place in range(2, 13)]
        for pid, token in enumerate(others, start=1):
            store.acquire(claim(token, limit=12, pid=pid, hostname=token))
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
            token: (pid, token) for pid, token in enumerate(others, start=1)
        }

    def test_a_successor_has_nothing_of_the_holder_that_died(self, store: Store) -> None:
        facts = {"task_id": "id-of-a", "task_name": "shop.a", "hostname": "w1@host", "pid": 42, "attempt": 3}
        store.acquire(claim("a", ttl=SHORT, **facts))
        self.let_expire(store)

        store.acquire(claim("b"))

        (holder,) = store.holders(KEY)
        assert holder.token == "b"
        assert (holder.task_id, holder.task_name, holder.hostname, holder.pid) == (None, None, None, None)
        assert holder.attempt == 0

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

    def test_a_fence_grows_where_nothing_is_left_but_a_mark(self, store: Store) -> None:
        before = granted(store.acquire(claim("a"))).fence
        store.release(claim("a"), 1)
        store.mark_queued(KEY, "queued", 60.0, limit=0, quiet=0.0)

        assert granted(store.acquire(claim("b"))).fence > before

    def test_fences_grow_however_fast_they_are_given(self, store: Store) -> None:
        fences = []
        for number in range(200):
            fences.append(granted(store.acquire(claim(f"t{number}"))).fence)
            store.release(claim(f"t{number}"), 1)

        assert fences == sorted(set(fences))

    def test_holders_of_one_lock_have_fences_of_their_own(self, store: Store) -> None:
        fences = [granted(store.acquire(claim(f"t{number}", limit=20))).fence for number in range(20)]

        assert fences == sorted(set(fences))
