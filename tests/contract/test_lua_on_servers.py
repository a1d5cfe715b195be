"""What the scripts cost on a server, and what they survive there."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores.records import RELEASED, Claim, Conflict, Done, Ending, Release, Renewal
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import KEY
from tests.contract.asking import OTHER as OTHER_KEY
from tests.servers import Server

MINE = Claim(KEY, "a", 30.0, task_id="id-of-a")
COPY = replace(MINE, may_be_copy=True)
NEXT = replace(MINE, token="b", task_id="id-of-b", succeeds="rerun", supersedes_for=60.0)


VERBS: dict[str, Callable[[Store], Any]] = {
    "acquire": lambda store: store.acquire(MINE),
    "a refused acquire": lambda store: store.acquire(Claim(KEY, "b", 30.0)),
    "renew": lambda store: store.renew([MINE, Claim(OTHER_KEY, "a", 30.0)], 1.0),
    "release": lambda store: store.release(MINE, 1),
    "release with an ending": lambda store: store.release(COPY, 1, ending=Ending("ended", 60.0, is_due=True)),
    "acquire of a copy": lambda store: store.acquire(COPY),
    "a refused acquire of the next": lambda store: store.acquire(NEXT),
    "mark_queued": lambda store: store.mark_queued(KEY, "id-of-a", 60.0, limit=1, cooldown=5.0),
    "unmark": lambda store: store.unmark(KEY, "id-of-a") or "ended",
    "mark_done": lambda store: store.mark_done(KEY, COPY.marker, 0, "stored", 60.0) or "noted",
    "survey": lambda store: store.survey([KEY]),
}


def warmed_up(store: Store) -> Store:
    store.acquire(MINE)
    store.renew([MINE], 1.0)
    store.release(MINE, 1)
    return store


def commands_of(server: Server, body: Callable[[], Any]) -> list[str]:
    """What clients sent to the server during *body*; a script's own commands are not sent."""
    sent = []
    with server.client() as client, server.client() as other:
        other.ping()
        with client.monitor() as monitor:
            body()
            other.echo("that is all")
            while (event := monitor.next_command())["command"] != "ECHO that is all":
                if event["client_type"] != "lua":
                    sent.append(event["command"])
    return sent


def test_each_verb_is_one_round_trip(server: Server, store: Store) -> None:
    for verb in VERBS.values():
        verb(warmed_up(store))

    sent = {name: commands_of(server, lambda verb=verb: verb(store)) for name, verb in VERBS.items()}

    assert {name: len(commands) for name, commands in sent.items()} == dict.fromkeys(VERBS, 1)
    assert all(commands[0].startswith("EVALSHA ") for commands in sent.values())


def test_a_large_renewal_goes_in_parts(server: Server, store: Store) -> None:
    warmed_up(store)
    claims = [Claim(f"k{number}", "a", 30.0) for number in range(220)]

    sent = commands_of(server, lambda: store.renew(claims, 1.0))

    assert [len(re.findall(r" k\d+", command)) for command in sent] == [50, 50, 50, 50, 20]


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_server_that_has_forgotten_the_scripts_is_told_them_again(
    store: Store, client: Any, verb: Callable[[Store], Any]
) -> None:
    warmed_up(store)
    store.acquire(MINE)

    client.script_flush()

    assert verb(store)


@pytest.fixture
def out_of_memory(client: Any) -> Iterator[Callable[[], object]]:
    client.config_set("maxmemory-policy", "noeviction")
    yield lambda: client.config_set("maxmemory", 1)
    client.config_set("maxmemory", 0)


@pytest.mark.parametrize("wanted", [replace(MINE, token="b"), replace(COPY, token="b")])
def test_a_server_out_of_memory_grants_nothing_tells_conflicts_renews_and_releases(
    store: Store, client: Any, out_of_memory: Callable[[], object], wanted: Claim
) -> None:
    warmed_up(store)
    store.acquire(replace(MINE, ttl=5.0))

    out_of_memory()

    with pytest.raises(StoreError, match="maxmemory"):
        store.acquire(replace(MINE, key=OTHER_KEY))
    conflict = store.acquire(wanted)
    assert isinstance(conflict, Conflict)
    assert (conflict.first.token, conflict.is_own) == ("a", wanted.may_be_copy)
    assert store.renew([MINE], 1.0) == [Renewal.RENEWED]
    assert store.holders(KEY)[0].expires_in > 5
    assert client.pttl(KEY) > 10_000
    # A copy that was met leaves a marker only with an ending.
    assert store.release(MINE, 1) == RELEASED
    assert not client.exists(KEY)


def test_an_ending_is_kept_by_a_server_out_of_memory(
    store: Store, client: Any, out_of_memory: Callable[[], object]
) -> None:
    store.acquire(MINE)

    out_of_memory()

    assert store.release(COPY, 1, ending=Ending("ended", 60.0, is_due=True)) == Release("left")
    assert client.hexists(KEY, COPY.marker)


def test_a_copy_of_an_ended_run_is_refused_by_a_server_that_takes_no_writes_and_kept_out_by_one_out_of_memory(
    store: Store, client: Any, out_of_memory: Callable[[], object]
) -> None:
    copy = replace(COPY, patience=1.0)
    store.mark_done(KEY, COPY.marker, 0, "stored", 60.0)

    client.config_set("min-replicas-to-write", 1)
    try:
        assert store.acquire(copy) == Done(0, "stored")
    finally:
        client.config_set("min-replicas-to-write", 0)

    before = client.hget(KEY, COPY.marker)
    out_of_memory()
    assert store.acquire(copy) == Done(0, "stored")
    assert client.hget(KEY, COPY.marker) > before
