"""How waiters sleep and wake, and a crowd of them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import RELEASED, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Contract, Waiter, claim, granted, queued


class Waking(Contract):
    """Waiters that are woken, and those that wake by themselves."""

    def test_a_release_that_comes_before_the_sleep_wakes_all_the_same(self, store: Store) -> None:
        store.acquire(claim("a"))
        with Waiter(store, claim("w")) as waiter:
            queued(waiter.ask())
            store.release(claim("a"), 1)
            asleep_at = clock()

            waiter.sleep(20)

            assert clock() - asleep_at < 10
            granted(waiter.ask())

    def test_a_release_wakes_the_first_waiter(self, store: Store) -> None:
        store.acquire(claim("a"))
        with Waiter(store, claim("w")) as waiter:
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
        with Waiter(store, claim("w")) as waiter:
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
                with Waiter(store, mine) as waiter:
                    while not isinstance(answer := waiter.ask(), Grant):
                        assert clock() < give_up_at, f"{mine.token} is not served"
                        waiter.sleep(min(answer, 0.2))
                with guard:
                    inside, served = inside + 1, served + 1
                    most = max(most, inside)
                time.sleep(0)  # let others try
                with guard:
                    inside -= 1
                assert store.release(mine, answer.place) == RELEASED

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(wait_for_turns, range(6)))

        assert most <= limit
        assert served == 6 * 8
        granted(store.acquire(claim("afterwards", limit=limit)))
