"""More than one place."""

from dataclasses import replace

import pytest

from celery_singleton_lock.stores.records import RELEASED, WHOLE, Claim, Grant, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import (
    KEY,
    SHORT,
    Contract,
    Waiter,
    call,
    claim,
    found,
    granted,
    mark_queued,
    queued,
    refused,
)


def whole(name: str = "whole") -> Claim:
    return claim(f"{WHOLE}{name}")


class Limit(Contract):
    def test_each_holder_has_a_deadline_of_its_own(self, store: Store) -> None:
        store.acquire(claim("long", limit=3, ttl=30))
        store.acquire(claim("short", limit=3, ttl=SHORT))
        store.acquire(claim("longer", limit=3, ttl=60))

        self.pass_time(1.5 * SHORT)

        assert [holder.token for holder in store.holders(KEY)] == ["long", "longer"]
        grant = granted(store.acquire(claim("newcomer", limit=3)))
        assert (grant.place, grant.took_over) == (2, True)
        assert store.renew([claim("long", limit=3), claim("short", limit=3)], 1.0) == [Renewal.RENEWED, Renewal.TAKEN]

    @pytest.mark.parametrize(("held", "wanted"), [(1, 3), (2, 3), (3, 2), (3, 1)])
    def test_the_limit_that_counts_is_that_of_the_asker(self, store: Store, held: int, wanted: int) -> None:
        fences = [granted(store.acquire(claim(f"old{n}", limit=held))).fence for n in range(held)]

        answers = [store.acquire(claim(f"new{n}", limit=wanted)) for n in range(4)]

        is_granted = [isinstance(answer, Grant) for answer in answers]
        assert is_granted == [n < wanted - held for n in range(4)]
        fences += [answer.fence for answer in answers if isinstance(answer, Grant)]
        assert fences == sorted(set(fences))
        assert len(store.holders(KEY)) == max(held, wanted)

    def test_a_conflict_tells_of_a_few_holders_among_them_the_one_that_ends_first(self, store: Store) -> None:
        for number in range(40):
            store.acquire(claim(f"t{number}", limit=40, ttl=20.0 if number == 31 else 30.0))

        conflict = refused(store.acquire(claim("one-more", limit=40)))

        assert len(conflict.holders) == 8
        assert conflict.first.token == "t31"
        assert len(store.holders(KEY)) == 40

    def test_who_has_the_whole_lock_keeps_everybody_out(self, store: Store) -> None:
        mine = whole()
        grant = granted(store.acquire(mine))

        for limit in (1, 3, 100):
            assert refused(store.acquire(claim("other", limit=limit))).first.fence == grant.fence
        refused(store.acquire(whole("another")))
        assert found(mark_queued(store, "q", limit=3)).fence == grant.fence
        assert store.renew([mine], 1.0) == [Renewal.RENEWED]
        assert granted(store.acquire(mine)).fence == grant.fence
        assert store.release(mine, grant.place) == RELEASED
        self.nothing_is_left(store)
        for name in "abc":
            granted(store.acquire(claim(name, limit=3)))

    def test_a_holder_that_has_died_keeps_nobody_from_the_whole_lock(self, store: Store) -> None:
        store.acquire(claim("short", limit=3, ttl=SHORT))
        refused(store.acquire(whole()))
        self.let_expire(store)

        assert granted(store.acquire(whole())).took_over
        refused(store.acquire(claim("other", limit=3)))

    def test_who_waits_for_the_whole_lock_gets_each_place_that_becomes_free(self, store: Store) -> None:
        for name in "ab":
            granted(store.acquire(claim(name, limit=3)))
        with Waiter(store, whole()) as waiter, Waiter(store, claim("later", limit=3)) as later:
            queued(waiter.ask())
            refused(store.acquire(claim("newcomer", limit=3)))
            queued(later.ask())
            store.release(claim("a", limit=3), 1)
            refused(store.acquire(claim("newcomer", limit=3)))
            queued(later.ask())
            queued(waiter.ask())
            store.release(claim("b", limit=3), 2)
            refused(store.acquire(claim("newcomer", limit=3)))

            granted(waiter.ask())
            queued(later.ask())
            store.release(whole(), 1)
            granted(later.ask())
        granted(store.acquire(claim("newcomer", limit=3)))

    def test_a_message_that_waits_and_who_wants_the_whole_lock_come_in_their_order(self, store: Store) -> None:
        granted(store.acquire(claim("a")))
        first, later = replace(call("sooner"), turn_for=60.0), replace(call("later"), turn_for=60.0, limit=3)
        first.rank = refused(store.acquire(first)).rank
        with Waiter(store, whole()) as waiter:
            queued(waiter.ask())
            later.rank = refused(store.acquire(later)).rank
            store.release(claim("a"), 1)

            queued(waiter.ask())
            granted(store.acquire(first))
            refused(store.acquire(later))
            store.release(first, 1)
            granted(waiter.ask())
            refused(store.acquire(later))
            store.release(whole(), 1)
        granted(store.acquire(later))
