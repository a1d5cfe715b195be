"""How one listener hears many channels."""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import KEY, Contract
from tests.forks import in_a_fork
from tests.waiting import until

CHANNEL = f"{KEY}:one"


def publish(store: Store, channel: str, text: str) -> int:
    """How many have heard it."""
    return int(store.call(store.servers.publish, channel, text))


@contextmanager
def hearing(store: Store, channel: str = CHANNEL) -> Iterator[list[str]]:
    """What is heard on a channel, that it listens first."""
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
    """How one listener hears many channels."""

    def test_each_message_is_heard_once_and_in_order(self, store: Store) -> None:
        with hearing(store) as told:
            for number in range(100):
                assert publish(store, CHANNEL, str(number)) == 1

            until(lambda: len(told) > 100, "all are heard")
            assert told == [LISTENING, *map(str, range(100))]

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

    def test_after_any_adding_and_removing_those_are_heard_that_were_added_last(self, store: Store) -> None:
        chance, told = random.Random(7), defaultdict[str, list[str]](list)
        channels = [f"{KEY}:{number}" for number in range(20)]
        wanted = dict.fromkeys(channels, False)
        for channel in chance.choices(channels, k=2000):
            wanted[channel] = not wanted[channel]
            if wanted[channel]:
                store.listener.add(channel, told[channel].append)
            else:
                store.listener.remove(channel)

        def right(channel: str) -> bool:
            return publish(store, channel, "hello") == wanted[channel]

        until(lambda: all(map(right, channels)), "the server knows which")
        heard = [channel for channel in channels if wanted[channel]]
        until(lambda: all("hello" in told[channel] for channel in heard), "they are heard")
        for channel in heard:
            store.listener.remove(channel)

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
