"""Places that stay taken."""

import pytest

from celery_singleton_lock.stores.records import RELEASED, Release, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import CLOCKS_DIFFER_BY, KEY, SHORT, Contract, claim, granted, refused


class Hold(Contract):
    """Places that stay taken."""

    def test_a_place_stays_taken_for_as_long_as_it_is_to_be_held_at_least(self, store: Store) -> None:
        mine = claim("a", min_hold=2 * SHORT, task_id="id-of-a")
        asked_at = self.now()
        grant = granted(store.acquire(mine))

        answer = store.release(mine, 1)
        conflict = refused(store.acquire(claim("b")))
        self.let_expire(store)

        assert answer == RELEASED
        assert (conflict.first.task_id, conflict.first.fence) == ("id-of-a", grant.fence)
        assert 0 < conflict.first.expires_in <= 2 * SHORT
        assert not granted(store.acquire(claim("b"))).took_over
        assert self.now() >= asked_at + 2 * SHORT - CLOCKS_DIFFER_BY

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

        assert renewed == [Renewal.TAKEN]
        assert released == [Release("none", "taken"), Release("none", "taken")]
        refused(store.acquire(claim("c")))
