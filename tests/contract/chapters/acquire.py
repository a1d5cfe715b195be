"""To take a lock, and to find it taken."""

from collections.abc import Callable

from celery_singleton_lock.stores.records import Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import CLOCKS_DIFFER_BY, KEY, OTHER, SHORT, Contract, claim, granted, refused, tokens


class Acquire(Contract):
    """To take a lock, and to find it taken."""

    def test_a_free_lock_is_granted(self, store: Store) -> None:
        grant = granted(store.acquire(claim("a")))

        assert grant.place == 1
        assert grant.fence > 0
        assert not grant.took_over

    def test_a_held_lock_is_refused_naming_the_holder(self, store: Store) -> None:
        facts = {"task_id": "id-of-a", "task_name": "shop.tasks.other", "hostname": "w1@höst", "pid": 42, "attempt": 3}
        grant = granted(store.acquire(claim("a", **facts)))

        conflict = refused(store.acquire(claim("b")))

        assert conflict.key == KEY
        assert conflict.holders == (conflict.first,)
        for holder in (conflict.first, *store.holders(KEY)):
            assert (holder.key, holder.token, holder.fence) == (KEY, "a", grant.fence)
            assert {name: getattr(holder, name) for name in facts} == facts
            assert 0 < holder.expires_in <= 30
            assert 0 <= holder.age < 60

    def test_asking_again_with_the_same_token_is_the_same_grant(self, store: Store) -> None:
        first = granted(store.acquire(claim("a")))

        again = granted(store.acquire(claim("a")))

        assert (again.place, again.fence, again.since) == (first.place, first.fence, first.since)
        assert not again.took_over
        assert len(store.holders(KEY)) == 1

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
