"""Those who wait in a process: their queue, how they sleep, and how one listener hears many channels and wakes them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import RELEASED, Grant
from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import CLOCKS_DIFFER_BY, KEY, SHORT, Contract, Waiter, claim, granted, queued, refused
from tests.forks import in_a_fork
from tests.waiting import until

CHANNEL = f"{KEY}:one"
REAL = 0.3
"""A ttl that a test waits for."""


def publish(store: Store, channel: str, text: str) -> int:
    return int(store.call(store.servers.publish, channel, text))


@contextmanager
def hearing(store: Store, channel: str = CHANNEL) -> Iterator[list[str]]:
    told = list[str]()
    store.listener.add(channel, told.append)
    try:
        until(lambda: told[:1] == [LISTENING], "it listens")
        yield told
    finally:
        store.listener.remove(channel)


def unheard(store: Store, channel: str = CHANNEL) -> bool:
    return publish(store, channel, "is anybody there") == 0


def hear_one(store: Store) -> list[str]:
    with hearing(store) as told:
        assert publish(store, CHANNEL, "hello") >= 1
        until(lambda: "hello" in told, "it is heard")
    return told


class Hearing(Contract):
    def test_nobody_listens_to_a_channel_that_was_removed(self, store: Store) -> None:
        with hearing(store) as told, hearing(store, f"{KEY}:other") as others:
            store.listener.remove(CHANNEL)

            until(lambda: unheard(store), "the server knows")
            assert publish(store, f"{KEY}:other", "hello") == 1
            until(lambda: "hello" in others, "the other one is heard")
            assert "hello" not in told

    def test_a_channel_that_comes_again_is_heard_by_the_last_who_asked(self, store: Store) -> None:
        first, last = list[str](), list[str]()
        with hearing(store, f"{KEY}:other"):
            for heard in (first, last):
                store.listener.add(CHANNEL, heard.append)
                until(lambda heard=heard: LISTENING in heard, "it listens")  # type: ignore[misc]
            assert publish(store, CHANNEL, "hello") == 1
            until(lambda: "hello" in last, "it is heard")
            store.listener.remove(CHANNEL)

        assert "hello" not in first

    def test_thousands_of_channels_are_heard_each_by_its_own(self, store: Store) -> None:
        told = {f"{KEY}:{number}": list[str]() for number in range(3000)}
        for channel, heard in told.items():
            store.listener.add(channel, heard.append)
        until(lambda: all(told.values()), "all listen")

        for channel in told:
            publish(store, channel, channel)

        until(lambda: all(len(heard) > 1 for heard in told.values()), "all are heard")
        # One that is published as the machine stands still may be published twice.
        assert {channel: set(heard) for channel, heard in told.items()} == {one: {LISTENING, one} for one in told}
        for channel in told:
            store.listener.remove(channel)
        until(lambda: all(unheard(store, channel) for channel in told), "nobody listens any more")

    def test_who_fails_on_a_message_harms_no_other(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        def fail(_: str) -> None:
            raise ArithmeticError("of the one who hears")

        store.listener.add(f"{KEY}:fails", fail)
        until(lambda: not unheard(store, f"{KEY}:fails"), "it listens")

        assert "hello" in hear_one(store)
        assert "lock.bug where=listener" in caplog.text
        assert "ArithmeticError" in caplog.text
        store.listener.remove(f"{KEY}:fails")

    def test_a_forked_child_hears_what_it_has_asked_for_itself(self, store: Store) -> None:
        with hearing(store) as told:
            # Not as uWSGI does: there is another thread, and only Python's own fork knows what to do about its locks.
            answer = in_a_fork(lambda: hear_one(store))
            publish(store, CHANNEL, "still there")

            until(lambda: "still there" in told, "the parent hears as before")
        assert LISTENING in answer
        assert "'hello'" in answer
        assert DEAF not in told


def connections_that_hear(client: Any) -> list[Any]:
    return [each for each in client.client_list(_type="pubsub") if not each["name"].startswith("sentinel")]


class Listening(Contract):
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
        # The listener of another test lingers for some seconds.
        before = {each["id"] for each in connections_that_hear(client)}
        with hearing(store), hearing(store, f"{KEY}:two"), hearing(store, f"{KEY}:three"):
            assert len({each["id"] for each in connections_that_hear(client)} - before) == 1

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
