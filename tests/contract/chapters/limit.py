"""More than one place."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Answer, Grant
from tests.contract.asking import (
    KEY,
    SHORT,
    Contract,
    claim,
    granted,
    queued,
    refused,
    tokens,
)


class Limit(Contract):
    """More than one place."""

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

    @pytest.mark.parametrize(("held", "wanted"), [(1, 3), (2, 3), (3, 2), (3, 1)])
    def test_the_limit_that_counts_is_that_of_the_asker(self, store: Store, held: int, wanted: int) -> None:
        fences = [granted(store.acquire(claim(f"old{n}", limit=held))).fence for n in range(held)]

        answers = [store.acquire(claim(f"new{n}", limit=wanted)) for n in range(4)]

        is_granted = [isinstance(answer, Grant) for answer in answers]
        assert is_granted == [n < wanted - held for n in range(4)]
        fences += [answer.fence for answer in answers if isinstance(answer, Grant)]
        assert fences == sorted(set(fences))
        assert len(store.holders(KEY)) == max(held, wanted)

    def test_a_lower_limit_waits_until_enough_have_left(self, store: Store) -> None:
        for token in "abc":
            store.acquire(claim(token, limit=3))
        for token in "ab":
            refused(store.acquire(claim("d", limit=1)))
            store.release(claim(token, limit=3), None)
        refused(store.acquire(claim("d", limit=1)))
        store.release(claim("c", limit=3), 3)

        assert granted(store.acquire(claim("d", limit=1))).place == 1
        refused(store.acquire(claim("e", limit=1)))

    def test_a_waiter_with_a_higher_limit_has_to_let_those_before_it_go_first(self, store: Store) -> None:
        store.acquire(claim("a"))
        with store.waiter(claim("narrow", limit=1)) as narrow, store.waiter(claim("wide", limit=2)) as wide:
            queued(narrow.ask())
            queued(wide.ask())
            queued(wide.ask())
            store.release(claim("a"), 1)

            granted(narrow.ask())
            granted(wide.ask())

    @pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
    def test_a_lock_whose_holders_are_dead_may_have_another_limit(self, store: Store, before: int, after: int) -> None:
        fences = [granted(store.acquire(claim(f"d{n}", limit=before, ttl=SHORT))).fence for n in range(before)]
        self.let_expire(store)

        grants = [granted(store.acquire(claim(f"t{number}", limit=after))) for number in range(after)]

        assert [grant.place for grant in grants] == list(range(1, after + 1))
        assert all(grant.fence > max(fences) for grant in grants)
        refused(store.acquire(claim("one-more", limit=after)))

    def test_a_conflict_tells_of_a_few_holders_among_them_the_one_that_ends_first(self, store: Store) -> None:
        for number in range(40):
            store.acquire(claim(f"t{number}", limit=40, ttl=20.0 if number == 31 else 30.0))

        conflict = refused(store.acquire(claim("one-more", limit=40)))

        assert len(conflict.holders) == 8
        assert conflict.first.token == "t31"
        assert len(store.holders(KEY)) == 40

    def test_very_many_hold_a_lock(self, store: Store) -> None:
        for number in range(1, 201):
            assert granted(store.acquire(claim(f"t{number}", limit=200))).place == number
        refused(store.acquire(claim("one-more", limit=200)))

        store.release(claim("t100", limit=200), 100)

        assert granted(store.acquire(claim("one-more", limit=200))).place == 100
