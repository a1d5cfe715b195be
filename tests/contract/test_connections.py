"""Connections to Redis: from however far away, how many there are, and what becomes of broken ones."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from redis.exceptions import ResponseError

from celery_singleton_lock import Lock, StoreError
from celery_singleton_lock.leases.counters import count, counters
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import ACQUIRE_BOUND, RELEASED, Renewal
from celery_singleton_lock.stores.redis import packed
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Waiter
from tests.contract.test_bounds import KEY, MINE, SLACK
from tests.proxy import Proxy
from tests.servers import Server, certificate, free_port, running
from tests.topologies.leases import final_result
from tests.waiting import SOON, Watch, lasted, until


def test_a_database_is_the_same_however_it_is_named(valkey: Server) -> None:
    server = valkey.url.removesuffix("/0")
    named = [("/3", {}), ("?db=3", {}), ("", {"db": 3}), ("", {}), ("/0", {}), ("/", {})]

    seen = []
    for rest, options in named:
        with closing(Store(f"{server}{rest}", options)) as store:
            seen.append(Inventory(store).databases(SOON))

    assert seen[0] == seen[1] == seen[2]
    assert seen[3] == seen[4] == seen[5]
    assert not seen[0] & seen[3]


@pytest.fixture
def far(far_line: Proxy, tmp_path: Path) -> str:
    """The URL of a store with TLS, a password and a database, whose every reply takes 0.4 s."""
    return f"rediss://shop:secret@127.0.0.1:{far_line.port}/1?ssl_ca_certs={tmp_path / 'cert.pem'}"


@pytest.fixture
def far_line(tmp_path: Path) -> Iterator[Proxy]:
    own, key = certificate(tmp_path)
    port = free_port()
    files = ("--tls-cert-file", str(own), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    password = ("--user", "shop", "on", ">secret", "~*", "&*", "+@all")
    with running("redis", "--tls-port", str(port), *files, *password) as _, Proxy(port) as proxy:
        proxy.delay(0.4)
        yield proxy


@pytest.mark.nightly  # the bounds are the product's own, so a machine that stands still breaks them
def test_a_store_far_away_grants_renews_and_releases_within_the_bounds(far: str) -> None:
    lock = Lock("stock", url=far, ttl=6)
    with Watch() as watch:
        lease = lock.acquire()
    assert watch.seconds < ACQUIRE_BOUND + SLACK
    first = final_result(lease)

    until(lambda: lease.lost or final_result(lease) > first, "it is renewed")

    lease.check()
    assert lasted(lock.release) < 2.0 + SLACK
    again = lock.acquire(blocking=False)
    assert again is not None, "it is free"
    again.release()


def test_scripts_that_are_not_known_cost_no_connection(valkey: Server) -> None:
    store = Store(valkey.url, {"client_name": "unknown"})
    store.acquire(MINE)
    store.renew([MINE], 1.0)
    with valkey.client() as client:
        client.script_flush()
        before = client.info("stats")["total_connections_received"]

        assert store.renew([MINE] * 120, 1.0) == [Renewal.RENEWED] * 120
        assert store.release(MINE, 1) == RELEASED

        assert client.info("stats")["total_connections_received"] == before
    store.close()


def test_after_a_refusal_no_reply_is_left_in_the_connection(valkey: Server) -> None:
    store = Store(f"{valkey.url}?client_name=refused", {})
    with valkey.client() as client:
        for _ in range(2):
            with pytest.raises(ResponseError):
                store.servers.call(KEY, [packed("GET"), packed("ECHO", "late")], clock() + 5)
            assert store.servers.call(KEY, [packed("ECHO", each) for each in "ab"], clock() + 5) == ["a", "b"]

        assert sum(each["name"] == "refused" for each in client.client_list()) == 1
    store.close()


def test_a_large_reply_is_read_in_a_few_steps(valkey: Server) -> None:
    with closing(Store(valkey.url, {})) as store:
        store.call("HSET", KEY, "large", "x" * 100_000)
        (link,) = store.servers._idle
        link._socket = Mock(wraps=link._socket)

        assert len(store.fields(KEY)["large"]) == 100_000
        assert link._socket.recv.call_count < 30


def test_a_key_of_another_program_among_many_is_found_in_a_few_requests(valkey: Server) -> None:
    keys = [f"singleton:v3:{{shop.tasks.sync:{number}}}" for number in range(64)]
    with closing(Store(valkey.url, {})) as store, valkey.client() as client:
        client.set(keys[40], "theirs")
        with patch.object(store.servers, "call", wraps=store.servers.call) as asked:
            states = store.survey(keys, tolerant=True)

        assert [state.key for state in states] == keys
        assert [state.key for state in states if state.problem] == [keys[40]]
        assert asked.call_count < 20


def test_a_claim_without_much_time_asks_no_longer_than_it_says(valkey: Server) -> None:
    hasty = replace(MINE, patience=0.3)

    def asks() -> None:
        with pytest.raises(StoreError):
            store.acquire(hasty)

    def waits() -> None:
        with Waiter(store, hasty) as waiter, pytest.raises(StoreError):
            waiter.ask()

    for refused, bound in ((asks, 0.3), (waits, 0.6)):
        took = []
        with Proxy(valkey.port) as proxy:
            proxy.black_hole()
            for _ in range(3):
                store = Store(proxy.url, {})
                took.append(lasted(refused))
                store.close()
        # A busy machine makes one or two of them longer.
        assert min(took) < bound + 0.7


def test_a_process_whose_threads_have_asked_at_once_goes_back_to_one_connection(valkey: Server) -> None:
    store = Store(f"{valkey.url}?client_name=of-two-threads", {})
    with valkey.client() as client, ThreadPoolExecutor(2) as pool:

        def connected() -> int:
            return sum(each["name"] == "of-two-threads" for each in client.client_list())

        client.client_pause(60_000, all=False)
        asking = [pool.submit(store.acquire, replace(MINE, token=token)) for token in ("a", "b")]
        until(lambda: connected() == 2, "both wait for their answers")
        client.client_unpause()
        assert all(each.result() for each in asking)

        # A busy process has something to count every five seconds.
        count(store, KEY, "late", "task")
        counters.flush()

        until(lambda: connected() == 1, "the other one is closed")
        assert store.holders(KEY)
        assert connected() == 1
    store.close()
