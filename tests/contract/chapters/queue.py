"""The queue of those who wait."""

import pytest

from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Answer, Grant
from tests.contract.asking import (
    KEY,
    LATE,
    SHORT,
    Contract,
    claim,
    granted,
    queued,
    refused,
    tokens,
)


class Queue(Contract):
    """The queue of those who wait."""

    def test_a_free_lock_is_granted_to_a_waiter_at_once(self, store: Store) -> None:
        with store.waiter(claim("w")) as waiter:
            grant = granted(waiter.ask())

        assert (grant.place, grant.took_over) == (1, False)
        assert tokens(store.holders(KEY)) == ["w"]

    def test_a_waiter_is_told_how_long_to_sleep_at_most(self, store: Store) -> None:
        store.acquire(claim("a", ttl=5))

        with store.waiter(claim("w")) as waiter:
            wait = queued(waiter.ask())

        assert 0 < wait <= 5
        assert tokens(store.holders(KEY)) == ["a"]

    def test_a_waiter_may_be_the_one_with_the_shorter_ttl(self, store: Store) -> None:
        store.acquire(claim("a", ttl=300))

        with store.waiter(claim("w", ttl=5)) as waiter:
            assert 0 < queued(waiter.ask()) <= 5

    def test_a_waiter_sleeps_until_the_first_of_several_holders_may_be_gone(self, store: Store) -> None:
        store.acquire(claim("long", limit=2, ttl=20))
        store.acquire(claim("short", limit=2, ttl=5))

        with store.waiter(claim("w", limit=2)) as waiter:
            assert 0 < queued(waiter.ask()) <= 5

    def test_a_waiter_gets_the_lock_once_it_is_released(self, store: Store) -> None:
        before = granted(store.acquire(claim("a")))
        with store.waiter(claim("w", task_id="id-of-w", hostname="w1@host")) as waiter:
            queued(waiter.ask())
            store.release(claim("a"), 1)

            grant = granted(waiter.ask())

        (holder,) = store.holders(KEY)
        assert (holder.token, holder.task_id, holder.hostname) == ("w", "id-of-w", "w1@host")
        assert grant.fence > before.fence
        assert not grant.took_over

    def test_a_waiter_gets_the_lock_once_its_holder_is_dead(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with store.waiter(claim("w")) as waiter:
            queued(waiter.ask())
            self.let_expire(store)

            assert granted(waiter.ask()).took_over

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

    def test_asking_again_after_the_grant_is_the_same_grant(self, store: Store) -> None:
        with store.waiter(claim("w")) as waiter:
            first, again = granted(waiter.ask()), granted(waiter.ask())

        assert (again.place, again.fence, again.since) == (first.place, first.fence, first.since)
        assert tokens(store.holders(KEY)) == ["w"]

    def test_a_newcomer_does_not_overtake_a_waiter_and_is_told_of_it(self, store: Store) -> None:
        store.acquire(claim("a"))
        with store.waiter(claim("w", task_id="id-of-w")) as waiter:
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

    def test_a_refused_newcomer_has_no_turn(self, store: Store) -> None:
        store.acquire(claim("a"))
        refused(store.acquire(claim("b")))

        assert store.release(claim("b"), None) is Answer.TAKEN
        store.release(claim("a"), 1)
        granted(store.acquire(claim("c")))

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

            assert answer is Answer.DONE
            granted(waiters["w2"].ask())

    def test_a_waiter_in_the_middle_that_gives_up_is_in_nobodys_way(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2", "w3") as waiters:
            store.release(claim("w2"), None)
            store.release(claim("a"), 1)
            granted(waiters["w1"].ask())
            store.release(claim("w1"), 1)

            granted(waiters["w3"].ask())

    def test_a_waiter_that_has_been_served_is_in_nobodys_way(self, store: Store) -> None:
        for token in "ab":
            store.acquire(claim(token, limit=2))
        with self.waiting(store, "w", limit=2) as waiters:
            queued(waiters["w"].ask())
            queued(waiters["w"].ask())
            store.release(claim("a", limit=2), 1)
            granted(waiters["w"].ask())

            store.release(claim("b", limit=2), 2)

            granted(store.acquire(claim("newcomer", limit=2)))

    def test_the_last_waiter_that_gives_up_leaves_a_free_lock(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w"):
            store.release(claim("a"), 1)

            assert store.release(claim("w"), None) is Answer.DONE

        assert not granted(store.acquire(claim("b"))).took_over

    def test_a_waiter_that_gave_up_has_no_turn_any_more(self, store: Store) -> None:
        store.acquire(claim("a"))
        with self.waiting(store, "w1", "w2") as waiters:
            store.release(claim("w1"), None)

            again = store.release(claim("w1"), None)
            queued(waiters["w1"].ask())  # a new turn, behind the other
            store.release(claim("a"), 1)

            assert again is Answer.TAKEN
            queued(waiters["w1"].ask())
            granted(waiters["w2"].ask())

    def test_a_waiter_that_dies_is_passed_over(self, store: Store) -> None:
        store.acquire(claim("a", ttl=SHORT))
        with self.waiting(store, "dead", "w") as waiters:
            self.let_expire(store)
            wait = queued(waiters["w"].ask())
            refused(store.acquire(claim("newcomer")))

            self.pass_time(wait + 0.01)

            assert wait <= LATE
            refused(store.acquire(claim("newcomer")))
            granted(waiters["w"].ask())
            assert store.release(claim("w"), 1) is Answer.DONE
        granted(store.acquire(claim("newcomer")))

    def test_waiters_get_as_many_places_as_are_free(self, store: Store) -> None:
        for token in "ab":
            store.acquire(claim(token, limit=2))
        with self.waiting(store, "w1", "w2", "w3", limit=2) as waiters:
            for place, token in enumerate("ab", start=1):
                store.release(claim(token, limit=2), place)

            queued(waiters["w3"].ask())
            places = {granted(waiters[token].ask()).place for token in ["w2", "w1"]}
            queued(waiters["w3"].ask())

            assert places == {1, 2}
            store.release(claim("w2", limit=2), None)
            granted(waiters["w3"].ask())
        assert tokens(store.holders(KEY)) == ["w1", "w3"]

    def test_newcomers_may_have_the_places_that_the_waiters_leave_over(self, store: Store) -> None:
        for token in "abc":
            store.acquire(claim(token, limit=3))
        with self.waiting(store, "w", limit=3) as waiters:
            store.release(claim("b", limit=3), 2)
            refused(store.acquire(claim("n1", limit=3)))
            store.release(claim("a", limit=3), 1)

            granted(store.acquire(claim("n1", limit=3)))
            refused(store.acquire(claim("n2", limit=3)))
            granted(waiters["w"].ask())

        assert tokens(store.holders(KEY)) == ["c", "n1", "w"]
