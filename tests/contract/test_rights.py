"""The rights that docs/reference/start.md lists are those that runs need, and the start asks for each of them."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.stores.records import RELEASED, Claim, Conflict, Ending, Grant, Slot
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Waiter
from tests.contract.chapters.hearing import CHANNEL, hear_one, hearing, unheard
from tests.servers import SERVERS, Server, running
from tests.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "start.md"
KEY = "singleton:v3:{rights:00}"
FACTS: dict[str, Any] = {"task_id": "t", "task_name": "task", "hostname": "h", "pid": 1}
(LINE,) = re.findall(r"^ACL SETUSER shop .*(?:\n +\S.*)*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
RIGHTS = LINE.split()[3:]
COMMANDS = sorted(right[1:] for right in RIGHTS if right.startswith("+"))


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as server:
        yield server


def store_of(server: Server, *more: str) -> Store:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "reset", *RIGHTS, *more)
    return Store(f"redis://shop:secret@127.0.0.1:{server.port}/1", {})


def test_all_that_runs_do_is_allowed(server: Server) -> None:
    store = store_of(server)
    claim = Claim(KEY, "a", 30.0, **FACTS)
    later = replace(claim, token="b", may_be_copy=True)

    Inventory(store).self_test(f"{KEY}:trial", 1.0)
    store.call("TIME")
    assert isinstance(store.acquire(claim), Grant)
    with Waiter(store, Claim(KEY, "w", 30.0)) as waiter:
        assert isinstance(waiter.ask(), float)
    assert "hello" in hear_one(store)
    until(lambda: unheard(store), "it listens no longer")
    store.acquire(later)
    store.renew([claim], 1.0)
    store.holders(KEY)
    store.acquire(replace(claim, token="c", succeeds="replace", supersedes_for=30.0, newest="next"))
    store.mark_queued(KEY, "u", 30.0, limit=1, cooldown=1.0)
    store.unmark(KEY, "u")
    store.release(claim, 1, ending=Ending("ended", 30.0, is_due=True))
    store.mark_done(KEY, later.marker, 1, "stored", 30.0)
    store.change_slot(f"{KEY}:slots", "claim", Slot("entry", 1, 1))
    store.slots(f"{KEY}:slots")
    store.count("singleton:v3:stats", {"acquired::task": 1}, 1.0)
    Inventory(store).counted("singleton:v3:stats")
    store.record("singleton:v3:history", ["an event"], 1.0)
    store.survey([KEY])
    Inventory(store).break_lock(KEY, ["a"], "alice", marks=True, force=True)
    store.asked_to_stop_by(claim, "broken")


def test_who_lists_locks_needs_one_right_more(server: Server) -> None:
    claim = Claim(KEY, "a", 30.0, **FACTS)
    with pytest.raises(ConfigurationError, match="'scan'"):
        list(Inventory(store_of(server)).keys("singleton:"))

    store = store_of(server, "+scan")
    store.acquire(claim)
    assert list(Inventory(store).keys("singleton:")) == [KEY]
    store.release(claim, 1)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_start_asks_for_each_right(server: Server, command: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Inventory(store_of(server, f"-{command}")).self_test(f"{KEY}:{command}", 1.0)

    assert f"'{command}'" in str(refused.value)
    assert "ACL SETUSER" in str(refused.value)


@pytest.mark.parametrize(("pattern", "what"), [("~singleton:*", "key"), ("&singleton:*", "channel")])
def test_the_start_asks_for_keys_and_channels(server: Server, pattern: str, what: str) -> None:
    assert pattern in RIGHTS
    others = [right.replace(pattern, pattern.replace("singleton", "shop")) for right in RIGHTS]
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "reset", *others)

    with pytest.raises(ConfigurationError) as refused:
        Inventory(Store(f"redis://shop:secret@127.0.0.1:{server.port}/1", {})).self_test(f"{KEY}:{what}", 5.0)

    assert what in str(refused.value)
    assert "ACL SETUSER" in str(refused.value)


def test_who_may_not_wake_waiters_releases_all_the_same(server: Server) -> None:
    holder, waiting = Claim(KEY, "a", 30.0, **FACTS), Claim(KEY, "w", 30.0)
    store = store_of(server)
    store.acquire(holder)
    with Waiter(store, waiting) as waiter:
        assert isinstance(waiter.ask(), float)
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "mute", "reset", *RIGHTS, "resetchannels")
        mute = Store(f"redis://mute:secret@127.0.0.1:{server.port}/1", {})

        assert mute.release(holder, 1) == RELEASED

        # Nobody knows that nobody hears, so the turn goes before newcomers.
        assert isinstance(store.acquire(replace(holder, token="newcomer")), Conflict)
        assert isinstance(waiter.ask(), Grant)
    store.release(waiting, 1)


def test_who_may_hear_no_channel_is_told_and_the_log_says_it_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(server, "resetchannels", "&of:others")
    for channel in (CHANNEL, f"{KEY}:two"):
        told = list[str]()
        store.listener.add(channel, told.append)
        until(lambda told=told: told == [DEAF], "it is told")  # type: ignore[misc]
        store.listener.remove(channel)

    (line,) = [line for line in caplog.messages if line.startswith("lock.not_subscribed")]
    assert "give the user shop that right with ACL SETUSER" in line


def test_who_may_not_unsubscribe_is_counted_as_a_listener_no_longer(server: Server) -> None:
    store = store_of(server, "-unsubscribe")
    with hearing(store, f"{KEY}:two") as told:
        hear_one(store)

        until(lambda: unheard(store), "it listens no longer")
        until(lambda: told.count(LISTENING) > 1, "the other one listens again")
