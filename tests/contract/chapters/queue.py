"""The queue of those who wait, and how they sleep and wake."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import RELEASED, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import KEY, SHORT, Contract, Waiter, claim, granted, queued, refused
from tests.contract.chapters.hearing import unheard
from tests.waiting import until


class Queue(Contract):
    def test_asking_again_keeps_the_turn(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2") as waiters:
            for token in ["w1", "w2", "w1"]:
                queued(waiters[token].ask())

            store.release(claim("a"), 1)

            queued(waiters["w2"].ask())
            granted(waiters["w1"].ask())

    def test_a_conflict_names_the_holders_or_where_there_are_none_the_waiters_that_go_before(
        self, store: Store
    ) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w2", "w1", "w3"):
            while_held = refused(store.acquire(claim("newcomer")))
            store.release(claim("a"), 1)
            while_free = refused(store.acquire(claim("newcomer")))

        assert [holder.token for holder in while_held.holders] == ["a"]
        assert [holder.token for holder in while_free.holders] == ["w2"]
        assert store.holders(KEY) == []

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

            assert answer == RELEASED
            granted(waiters["w2"].ask())

    @pytest.mark.parametrize("gone", ["with its holder", "before a release", "before their turn"])
    def test_waiters_that_died_keep_no_newcomer_out_and_no_waiter_asleep(self, store: Store, gone: str) -> None:
        store.acquire(claim("a", ttl=SHORT))
        # It closes the connections of those who wait, and that is all the store sees of their death.
        dead = [f"dead-{number}" for number in range(12)]
        with self.waiting(store, *dead):
            pass
        until(lambda: all(unheard(store, f"{KEY}:{each}") for each in dead), "the store knows that nobody listens")
        if gone == "before their turn":
            with Waiter(store, claim("w", ttl=SHORT)) as waiter:
                assert queued(waiter.ask()) <= SHORT
                self.let_expire(store)
                granted(waiter.ask())
        else:
            self.let_expire(store) if gone == "with its holder" else store.release(claim("a"), 1)
            granted(store.acquire(claim("newcomer")))

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
