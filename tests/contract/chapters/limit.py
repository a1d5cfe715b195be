"""More than one place."""

import pytest

from celery_singleton_lock.stores.records import Answer, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import KEY, SHORT, Contract, claim, granted, refused, tokens


class Limit(Contract):
    """More than one place."""

    def test_as_many_as_the_limit_hold_a_lock(self, store: Store) -> None:
        grants = [granted(store.acquire(claim(token, limit=3))) for token in "abc"]

        conflict = refused(store.acquire(claim("d", limit=3)))

        assert [grant.place for grant in grants] == [1, 2, 3]
        assert tokens(conflict.holders) == tokens(store.holders(KEY)) == ["a", "b", "c"]

    def test_each_holder_has_a_deadline_of_its_own(self, store: Store) -> None:
        store.acquire(claim("long", limit=3, ttl=30))
        store.acquire(claim("short", limit=3, ttl=SHORT))
        store.acquire(claim("longer", limit=3, ttl=60))

        self.pass_time(1.5 * SHORT)

        assert [holder.token for holder in store.holders(KEY)] == ["long", "longer"]
        grant = granted(store.acquire(claim("newcomer", limit=3)))
        assert (grant.place, grant.took_over) == (2, True)
        assert store.renew([claim("long", limit=3), claim("short", limit=3)], 1.0) == [Answer.DONE, Answer.TAKEN]

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
