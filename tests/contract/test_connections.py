"""Connections to Redis: from however far away, how many there are, and what becomes of broken ones."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Connection

from celery_singleton_lock import Lease, Lock, StoreError
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, PUBLISH_BOUND, clock
from celery_singleton_lock.stores.records import Answer, Claim, Facts, Grant, Slot
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.contract.test_bounds import KEY, MINE, SLACK, asked
from tests.proxy import Proxy
from tests.servers import Server, certificate, free_port, running
from tests.waiting import until


def claim_of(number: int) -> Claim:
    return Claim(f"singleton:v3:{{other:{number:02}}}", "a", 30.0)


OTHER = claim_of(0)


@pytest.fixture
def proxy(valkey: Server) -> Iterator[Proxy]:
    with Proxy(valkey.port) as proxy:
        yield proxy


def connected(server: Server, name: str) -> int:
    """How many connections with this name the server has."""
    with server.client() as client:
        return sum(1 for one in client.client_list() if one["name"] == name)


def open_many(store: RedisStore, proxy: Proxy, number: int) -> None:
    """Have *number* calls at the same time, so that each has a connection of its own, which is idle after."""
    proxy.delay(0.4)
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(store.acquire, map(claim_of, range(number))))
    proxy.forward()


# What is sent.


class Recorder:
    """What packs commands, and what it was given."""

    def __init__(self) -> None:
        self._packer = Connection()._command_packer
        self.seen: list[Any] = []

    def pack(self, *arguments: Any) -> Any:
        self.seen += arguments
        return self._packer.pack(*arguments)


def test_only_text_goes_to_the_parser(valkey: Server) -> None:
    recorder = Recorder()
    url = f"redis://default:any@127.0.0.1:{valkey.port}/1"
    with valkey.client() as client:
        client.config_set("requirepass", "any")
        store = RedisStore(url, {"command_packer": recorder, "client_name": "shop"})
        store.acquire(MINE)
        asked(store)
        store.renew([MINE] * 60, 1.0)
        store.remaining([MINE], 1.0)
        store.holders(KEY)
        store.release(MINE, 1)
        store.mark_queued(KEY, "a", 60.0, limit=1, quiet=1.0)
        store.acquire(replace(MINE, token="b", succeeds="rerun", supersedes_for=60.0, asked=True))
        store.unmark(KEY, "a")
        store.mark_done(KEY, "done:a:0", 0, "stored", 60.0)
        store.claim_slot(KEY, Slot("entry", 1, 2))
        client.config_set("requirepass", "")

    assert "SELECT" in recorder.seen
    assert {type(each) for each in recorder.seen} <= {str, bytes}


# Distance.


@pytest.fixture
def far(far_line: Proxy, tmp_path: Path) -> str:
    """The URL of a store with TLS, a password and a database, whose every reply takes 0.4 s."""
    return f"rediss://shop:secret@127.0.0.1:{far_line.port}/1?ssl_ca_certs={tmp_path / 'cert.pem'}"


@pytest.fixture
def far_line(tmp_path: Path) -> Iterator[Proxy]:
    """What leads to it."""
    own, key = certificate(tmp_path)
    port = free_port()
    files = ("--tls-cert-file", str(own), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    password = ("--user", "shop", "on", ">secret", "~*", "&*", "+@all")
    with running("redis", "--tls-port", str(port), *files, *password) as _, Proxy(port) as proxy:
        proxy.delay(0.4)
        yield proxy


def end_of(lease: Lease) -> float:
    """When it ends unless it is renewed; renewals are further apart than the tenth that is rounded away."""
    return round(clock() + lease.remaining(), 1)


@pytest.mark.prove
def test_a_store_far_away_grants_renews_and_releases_within_the_bounds(far: str) -> None:
    lock = Lock("stock", url=far, ttl=6)
    began = clock()
    lease = lock.acquire()
    assert lease is not None
    assert clock() - began < ACQUIRE_BOUND + SLACK
    first = end_of(lease)

    until(lambda: lease.lost or end_of(lease) > first, "it is renewed")

    lease.check()
    began = clock()
    lock.release()
    assert clock() - began < 2.0 + SLACK
    again = lock.acquire(blocking=False)
    assert again is not None, "it is free"
    again.release()


@pytest.mark.prove
def test_a_call_that_is_published_from_far_away_is_marked(far: str) -> None:
    store = RedisStore(far, {})
    began = clock()
    # It opens the connection, and the server may not know the script yet.
    first = answered(lambda: store.mark_queued(KEY, "a", 60.0, limit=1, quiet=0.0))
    assert clock() - began < PUBLISH_BOUND + SLACK

    assert first == [None] or store.mark_queued(KEY, "a", 60.0, limit=1, quiet=0.0) is None

    store.close()


def answered(call: Callable[[], Any]) -> list[Any]:
    """What *call* returns, or nothing."""
    with suppress(StoreError):
        return [call()]
    return []


def test_scripts_that_are_not_known_cost_no_connection(valkey: Server) -> None:
    store = RedisStore(valkey.url, {"client_name": "unknown"})
    store.acquire(MINE)
    store.renew([MINE], 1.0)
    with valkey.client() as client:
        client.script_flush()
        before = client.info("stats")["total_connections_received"]

        assert store.renew([MINE] * 120, 1.0) == [Answer.DONE] * 120
        assert store.release(MINE, 1) == Answer.DONE

        assert client.info("stats")["total_connections_received"] == before
    store.close()


# Silence.


def test_idle_connections_that_were_cut_silently_cost_one_try(proxy: Proxy) -> None:
    store = RedisStore(proxy.url, {})
    open_many(store, proxy, 6)
    proxy.forget()
    began = clock()

    assert isinstance(store.acquire(MINE), Grant)
    for number in range(6):
        assert store.release(claim_of(number), 1) == Answer.DONE

    assert clock() - began < 2 + SLACK
    store.close()


def test_what_is_lost_and_found_again_is_renewed_at_once(proxy: Proxy) -> None:
    lease = Lock("stock", url=proxy.url, ttl=300).acquire()
    assert lease is not None
    full = lease.remaining()
    until(lambda: lease.remaining() < full - 0.5, "some of it is over")

    proxy.cut()
    with Lock("another", url=proxy.url):
        until(lambda: lease.remaining() > full - 0.3, "it is renewed")

    lease.release()


# How many.


def test_locks_that_give_one_url_share_their_connections(valkey: Server) -> None:
    url = f"{valkey.url}?client_name=shared"
    locks = [Lock(f"stock-{number}", url=url) for number in range(300)]
    threads = threading.active_count()
    leases = [lock.acquire() for lock in locks]

    assert all(leases)
    assert connected(valkey, "shared") <= 4
    # Others of this process may begin meanwhile, but none for each lock.
    assert threading.active_count() < threads + 10
    for lock in locks:
        lock.release()


def test_locks_of_other_stores_share_nothing(valkey: Server) -> None:
    one, other = Lock("stock", url=valkey.url), Lock("stock", url=f"{valkey.url}?db=1")

    with one, other as lease:
        assert lease.held


# Names.


def lasted(call: Callable[[], Any]) -> float:
    began = clock()
    call()
    return clock() - began


@pytest.mark.prove
def test_after_one_has_asked_in_vain_the_next_do_not_persist_until_there_is_an_answer() -> None:
    server = Server("valkey")
    store = RedisStore(server.url, {})
    of_a_task = replace(MINE, facts=Facts(task_id="a"))

    def refused() -> None:
        with pytest.raises(StoreError):
            store.acquire(of_a_task)

    assert lasted(refused) > ACQUIRE_BOUND - SLACK
    assert max(lasted(refused) for _ in range(5)) < SLACK

    server.start()
    assert isinstance(store.acquire(of_a_task), Grant)
    server.stop()
    store.close()
    server.close()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_name_of_any_letters_is_one_key_in_each_encoding(valkey: Server, encoding: str) -> None:
    store = RedisStore(valkey.url, {"encoding": encoding})
    claim = replace(MINE, key="singleton:v3:{größe:00}")

    assert isinstance(store.acquire(claim), Grant)
    assert store.renew([claim], 1.0) == [Answer.DONE]
    assert store.release(claim, 1) is Answer.DONE
    store.close()


def test_a_claim_without_much_time_asks_no_longer_than_it_says(valkey: Server) -> None:
    hasty = replace(MINE, patience=0.3)

    def asks() -> None:
        with pytest.raises(StoreError):
            store.acquire(hasty)

    def waits() -> None:
        with store.waiter(hasty) as waiter, pytest.raises(StoreError):
            waiter.ask()

    for refused, bound in ((asks, 0.3), (waits, 0.6)):
        took = []
        with Proxy(valkey.port) as proxy:
            proxy.black_hole()
            for _ in range(3):
                store = RedisStore(proxy.url, {})
                took.append(lasted(refused))
                store.close()
        # A busy machine makes one or two of them longer.
        assert min(took) < bound + 0.7


def test_a_name_is_asked_after_for_each_connection(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real, leads_to = socket.getaddrinfo, ["127.0.0.9"]

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        is_name = host == "locks.test" and not options.get("flags")
        return real(leads_to[0] if is_name else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    store = RedisStore(f"redis://locks.test:{valkey.port}/0", {})
    with pytest.raises(StoreError, match="refused"):
        store.renew([MINE], 1.0)

    leads_to[0] = "127.0.0.1"

    assert isinstance(store.acquire(MINE), Grant)
    store.close()
