"""The queue of those who wait."""

import pytest

from celery_singleton_lock.stores.records import RELEASED, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import CALLED, KEY, SHORT, Contract, Waiter, claim, granted, queued, refused
from tests.contract.chapters.hearing import unheard
from tests.waiting import until


class Queue(Contract):
    """The queue of those who wait."""

    def test_a_waiter_gets_the_lock_once_it_is_released(self, store: Store) -> None:
        before = granted(store.acquire(claim("a")))
        with Waiter(store, claim("w", task_id="id-of-w", hostname="w1@host")) as waiter:
            queued(waiter.ask())
            store.release(claim("a"), 1)

            grant = granted(waiter.ask())

        (holder,) = store.holders(KEY)
        assert (holder.token, holder.task_id, holder.hostname) == ("w", "id-of-w", "w1@host")
        assert grant.fence > before.fence
        assert not grant.took_over

    def test_waiters_are_served_in_the_order_of_their_arrival(self, store: Store) -> None:
        store.acquire(claim("a"))
        served = ["a"]
        with self.waiting(store, "w1", "w2", "w3") as waiters:
            while waiters:
                store.release(claim(served[-1]), 1)
                answers = {token: waiters[token].ask() for token in sorted(waiters, reverse=True)}
                granted_to = [token for token, answer in answers.items() if isinstance(answer, Grant)]
                assert len(granted_to) == 1
                served += granted_to
                del waiters[granted_to[0]]

        assert served == ["a", "w1", "w2", "w3"]

    def test_asking_again_keeps_the_turn(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2") as waiters:
            for token in ["w1", "w2", "w1"]:
                queued(waiters[token].ask())

            store.release(claim("a"), 1)

            queued(waiters["w2"].ask())
            granted(waiters["w1"].ask())

    def test_a_newcomer_does_not_overtake_a_waiter_and_is_told_of_it(self, store: Store) -> None:
        store.acquire(claim("a"))
        with Waiter(store, claim("w", task_id="id-of-w")) as waiter:
            queued(waiter.ask())
            store.release(claim("a"), 1)

            conflict = refused(store.acquire(claim("newcomer")))

            assert (conflict.first.token, conflict.first.task_id) == ("w", "id-of-w")
            assert conflict.first.expires_in > 0
            granted(waiter.ask())

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

    def test_a_waiter_that_dies_is_passed_over(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with self.waiting(store, "dead", "w") as waiters:
            self.let_expire(store)
            assert queued(waiters["w"].ask()) <= CALLED
            refused(store.acquire(claim("newcomer")))

            self.pass_time(CALLED + 0.01)

            refused(store.acquire(claim("newcomer")))
            granted(waiters["w"].ask())
            assert store.release(claim("w"), 1) == RELEASED
        granted(store.acquire(claim("newcomer")))

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
