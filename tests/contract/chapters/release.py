"""To give a lock back."""

import pytest

from celery_singleton_lock.stores.records import RELEASED
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import GONE, KEY, SHORT, TAKEN, Contract, claim, granted, tokens


class Release(Contract):
    """To give a lock back."""

    def test_a_released_lock_is_free(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a")))

        answer = store.release(claim("a"), grant.place)

        assert answer == RELEASED
        assert store.holders(KEY) == []
        assert not granted(store.acquire(claim("b"))).took_over

    def test_a_release_by_a_stranger_leaves_the_lock_alone(self, store: Store) -> None:
        store.acquire(claim("a"))

        answer = store.release(claim("b"), 1)

        assert answer == TAKEN
        assert tokens(store.holders(KEY)) == ["a"]

    def test_a_second_release_finds_nothing_or_the_successor(self, store: Store) -> None:
        store.acquire(claim("a"))
        store.release(claim("a"), 1)

        again = store.release(claim("a"), 1)
        store.acquire(claim("b"))
        once_more = store.release(claim("a"), 1)

        assert (again, once_more) == (GONE, TAKEN)
        assert tokens(store.holders(KEY)) == ["b"]

    def test_a_run_past_its_deadline_does_not_free_its_successor(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        self.let_expire(store)
        store.acquire(claim("b"))

        answer = store.release(claim("a"), 1)

        assert answer == TAKEN
        assert tokens(store.holders(KEY)) == ["b"]

    @pytest.mark.parametrize("token", ["a", "b", "c"])
    def test_a_release_without_a_place_finds_it(self, store: Store, token: str) -> None:
        for other in ["a", "b", "c"]:
            store.acquire(claim(other, limit=3))

        answer = store.release(claim(token, limit=3), None)

        assert answer == RELEASED
        assert tokens(store.holders(KEY)) == sorted({"a", "b", "c"} - {token})
