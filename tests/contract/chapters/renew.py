"""To keep a lock."""

from collections.abc import Callable

import pytest

from celery_singleton_lock.stores.records import Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import KEY, OTHER, SHORT, Contract, Waiter, claim, granted, queued, refused, tokens


class Renew(Contract):
    """To keep a lock."""

    def test_a_renewal_starts_the_ttl_afresh(self, store: Store) -> None:
        store.acquire(claim("a", ttl=5))

        answers = store.renew([claim("a", ttl=30)], 1.0)

        assert answers == [Renewal.RENEWED]
        assert 5 < store.holders(KEY)[0].expires_in <= 30

    def test_a_lock_is_held_for_as_long_as_it_is_renewed(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))

        for _ in range(6):
            self.pass_time(SHORT / 4)
            assert store.renew([claim("a", ttl=SHORT)], 1.0) == [Renewal.RENEWED]

        assert tokens(store.holders(KEY)) == ["a"]

    def test_a_lease_past_its_deadline_is_renewed_while_nobody_else_has_had_its_place(self, store: Store) -> None:
        granted(store.acquire(claim("a", ttl=SHORT, limit=2)))
        granted(store.acquire(claim("long", limit=2)))  # so that the key stays
        self.pass_time(1.5 * SHORT)
        ended = tokens(store.holders(KEY))

        answers = store.renew([claim("a", ttl=SHORT, limit=2)], 1.0)

        assert ended == ["long"]
        assert answers == [Renewal.RENEWED]
        assert tokens(refused(store.acquire(claim("b", limit=2))).holders) == ["a", "long"]

    def test_a_lease_past_its_deadline_is_renewed_until_a_waiter_has_its_place(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with Waiter(store, claim("w")) as waiter:
            queued(waiter.ask())
            self.let_expire(store)
            before = store.renew([claim("a", ttl=SHORT)], 1.0)
            queued(waiter.ask())
            self.let_expire(store)

            granted(waiter.ask())

        assert before == [Renewal.RENEWED]
        assert store.renew([claim("a", ttl=SHORT)], 1.0) == [Renewal.TAKEN]
        assert tokens(store.holders(KEY)) == ["w"]

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_lock_that_another_had_in_between_is_not_revived(self, store: Store, limit: int) -> None:
        store.acquire(claim("a", limit=limit, ttl=SHORT))
        self.let_expire(store)
        store.acquire(claim("b", limit=limit))
        store.release(claim("b", limit=limit), 1)

        answers = store.renew([claim("a", limit=limit)], 1.0)

        assert answers == [Renewal.GONE]
        assert store.holders(KEY) == []
        granted(store.acquire(claim("c", limit=limit)))

    def test_a_lock_whose_data_the_store_has_lost_is_not_revived(
        self, store: Store, lose_all: Callable[[], object]
    ) -> None:
        store.acquire(claim("a"))
        lose_all()

        answers = store.renew([claim("a")], 1.0)

        assert answers == [Renewal.GONE]
        granted(store.acquire(claim("b")))

    def test_renewals_are_answered_one_by_one_in_their_order(self, store: Store) -> None:
        store.acquire(claim("a", key=KEY))
        store.acquire(claim("b", key=OTHER))

        answers = store.renew(
            [
                claim("gone", key="singleton:v3:{nobody:00}"),
                claim("b", key=OTHER),
                claim("stranger", key=KEY),
                claim("a", key=KEY),
            ],
            1.0,
        )

        assert answers == [Renewal.GONE, Renewal.RENEWED, Renewal.TAKEN, Renewal.RENEWED]
