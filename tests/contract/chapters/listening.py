"""How waiters in a server are woken, and what its own clock decides."""

from typing import Any

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Grant
from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import CLOCKS_DIFFER_BY, KEY, Contract, Waiter, claim, granted, queued
from tests.contract.chapters.hearing import CHANNEL, hearing, publish
from tests.waiting import until

REAL = 0.3
"""A ttl that a test waits for."""


def connections_that_hear(client: Any) -> list[Any]:
    """Without those of Sentinel."""
    return [each for each in client.client_list(_type="pubsub") if not each["name"].startswith("sentinel")]


class Listening(Contract):
    """How waiters in a server are woken, and what its own clock decides."""

    def test_a_waiter_listens_on_one_connection_and_closes_it(self, store: Store, client: Any) -> None:
        store.acquire(claim("a"))

        with self.waiting(store, "w"):
            during = client.pubsub_channels("singleton:*")

        assert during == [f"{KEY}:w"]
        until(lambda: not client.pubsub_channels("singleton:*"), "the connection is closed")

    def test_a_waiter_whose_connection_has_died_listens_again(self, store: Store, client: Any) -> None:
        store.acquire(claim("a"))
        with Waiter(store, claim("w")) as waiter:
            queued(waiter.ask())
            client.client_kill_filter(_type="pubsub")
            asleep_at = clock()
            waiter.sleep(20)
            looked_again_after = clock() - asleep_at
            queued(waiter.ask())
            until(lambda: client.pubsub_channels("singleton:*") == [f"{KEY}:w"], "it listens again")
            store.release(claim("a"), 1)
            asleep_at = clock()
            waiter.sleep(20)

            assert looked_again_after < 10
            assert clock() - asleep_at < 10
            granted(waiter.ask())

    def test_a_waiter_that_sleeps_as_long_as_it_was_told_finds_a_dead_holders_place(self, store: Store) -> None:
        asked_at = clock()
        store.acquire(claim("a", ttl=REAL))
        with Waiter(store, claim("w")) as waiter:
            waiter.sleep(queued(waiter.ask()))

            until(lambda: isinstance(waiter.ask(), Grant), "it is granted", timeout=REAL)

        assert clock() >= asked_at + REAL - CLOCKS_DIFFER_BY

    def test_a_listener_has_one_connection_for_all_channels(self, store: Store, client: Any) -> None:
        until(lambda: not connections_that_hear(client), "those of other tests are closed")
        with hearing(store), hearing(store, f"{KEY}:two"), hearing(store, f"{KEY}:three"):
            assert len(connections_that_hear(client)) == 1

    def test_a_listener_whose_connection_has_died_says_so_and_listens_again(self, store: Store, client: Any) -> None:
        with hearing(store) as told:
            client.client_kill_filter(_type="pubsub")

            until(lambda: told.count(LISTENING) > 1, "it listens again")
            publish(store, CHANNEL, "hello")
            until(lambda: "hello" in told, "it is heard")
        assert DEAF in told

    def test_a_listener_with_nothing_to_hear_ends_and_begins_again(self, store: Store, client: Any) -> None:
        for _ in range(2):
            with hearing(store) as told:
                publish(store, CHANNEL, "hello")
                until(lambda told=told: "hello" in told, "it is heard")  # type: ignore[misc]
            until(lambda: not connections_that_hear(client), "its connection is closed")
