"""Connections to Redis: how they open, from however far away, how many there are, and what becomes of broken ones."""

import _thread
import signal
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
from celery_singleton_lock.leases.keepalive import Keepalive
from celery_singleton_lock.leases.lease import own_heartbeat
from celery_singleton_lock.leases.leftovers import Unreleased
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, PUBLISH_BOUND, clock
from celery_singleton_lock.stores.records import Answer, Claim, Facts, Grant, Slot
from celery_singleton_lock.stores.redis import names, packing, wire
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.contract.test_bounds import KEY, MINE, SLACK, asked
from tests.integration.test_lock import in_a_fork
from tests.proxy import Proxy
from tests.servers import Server, certificate, free_port, running
from tests.waiting import until


def claim_of(number: int) -> Claim:
    return Claim(f"singleton:v2:{{other:{number:02}}}", "a", 30.0)


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
        store.succeed(MINE, "rerun", "t", "", 60.0)
        store.unmark(KEY, "a")
        store.mark_done(f"{KEY}:done:a", 0, "stored", 60.0)
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


def test_a_store_far_away_grants_renews_and_releases_within_the_bounds(far: str) -> None:
    lock = Lock("stock", url=far, ttl=6)
    began = clock()
    lease = lock.acquire()
    assert lease is not None
    assert clock() - began < ACQUIRE_BOUND + SLACK
    first = lease._renewal.deadline

    until(lambda: lease.lost or lease._renewal.deadline > first, "it is renewed")

    lease.check()
    began = clock()
    lock.release()
    assert clock() - began < 2.0 + SLACK
    assert lock._store.holders(lock.key) == []


def test_what_is_far_away_is_given_back_and_kept_alive_in_the_background(far: str) -> None:
    store = RedisStore(far, {})
    lease = Lease(store, Claim(KEY, "a", 6.0))
    assert lease.acquire() is None
    # As where its heartbeat gets no time to run.
    own_heartbeat.forget(lease._renewal)
    late, first = [lease._renewal], lease._renewal.deadline

    Keepalive(lambda: late).start(store, 6.0)

    until(lambda: lease._renewal.deadline > first, "it is kept alive", timeout=6)
    late.clear()
    until(Unreleased(RedisStore(far, {}), lease.claim, 1).release_again, "it is given back")
    assert store.holders(KEY) == []


def test_a_new_connection_costs_three_round_trips_with_tls_a_password_and_a_database(far: str, far_line: Proxy) -> None:
    RedisStore(far, {}).acquire(MINE)
    store = RedisStore(far, {"client_name": "shop"})
    before = far_line.turns

    store.acquire(MINE)

    # The handshake, which is two with an old TLS; who we are and which database; the question. And that of TCP.
    assert far_line.turns - before == 3
    store.acquire(MINE)
    assert far_line.turns - before == 4


def test_after_the_first_call_that_is_published_from_far_away_they_are_marked(far: str) -> None:
    store = RedisStore(far, {})
    began = clock()
    with pytest.raises(StoreError):
        store.mark_queued(KEY, "first", 60.0, limit=1, quiet=0.0)
    assert clock() - began < PUBLISH_BOUND + SLACK

    found = until(lambda: answered(lambda: store.mark_queued(KEY, "later", 60.0, limit=1, quiet=0.0)), "it is answered")

    assert found[0] is None or found[0].task_id == "first"
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


def test_a_timeout_does_not_cost_connections_that_have_answered_meanwhile(valkey: Server, proxy: Proxy) -> None:
    store = RedisStore(proxy.url, {"client_name": "answers"})
    open_many(store, proxy, 2)
    lost = proxy.lose_reply(to=b"singleton:v2:{other:00}")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(store.release, claim_of(0), 1)
        until(lost.is_set, "its reply is lost")
        with valkey.client() as client:
            before = client.info("stats")["total_connections_received"]
            assert isinstance(store.acquire(MINE), Grant)
            assert slow.result() == Answer.DONE
            assert client.info("stats")["total_connections_received"] == before
    store.close()


def test_the_kernel_looks_after_idle_connections(valkey: Server) -> None:
    store = RedisStore(valkey.url, {})
    store.acquire(MINE)
    connection, _ = store._wire._idle[0]

    assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connection._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
    store.close()


def test_what_is_lost_and_found_again_is_renewed_at_once(proxy: Proxy) -> None:
    store = RedisStore(proxy.url, {})
    lease = Lease(store, Claim(KEY, "a", 300.0))
    assert lease.acquire() is None
    first = lease._renewal.deadline

    proxy.cut()
    store.acquire(OTHER)

    until(lambda: lease._renewal.deadline > first, "it is renewed")
    lease.release()
    store.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_that_reconnects_does_not_wait_for_the_heartbeat_of_its_parent(valkey: Server) -> None:
    store = RedisStore(valkey.url, {})
    lease = Lease(store, MINE)
    assert lease.acquire() is None

    def reconnect() -> bool:
        signal.alarm(10)
        store.acquire(OTHER)
        with valkey.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        return isinstance(store.acquire(OTHER), Grant)

    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with own_heartbeat._lock:
            is_held.set()
            is_over.wait(20)

    # As the heartbeat might, at that moment.
    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(20)
    try:
        assert in_a_fork(reconnect) == "True"
    finally:
        is_over.set()
        holder.join(20)
    lease.release()
    store.close()


# How many.


def test_connections_that_nobody_needs_are_closed(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(valkey.port) as proxy:
        store = RedisStore(proxy.url, {"client_name": "many"})
        open_many(store, proxy, 20)
        with ThreadPoolExecutor(20) as pool:
            # Each has its ears.
            list(pool.map(lambda number: heard(store, number), range(20)))
        assert connected(valkey, "many") > 30
        monkeypatch.setattr(wire, "LONGEST_IDLE", 0.2)
        monkeypatch.setattr(wire, "LOOK_AGAIN", 0.1)
        store._wire._look_at = 0.0

        until(lambda: store.acquire(MINE) and connected(valkey, "many") <= 2, "the others are closed")
        store.close()


together = threading.Barrier(20)


def heard(store: RedisStore, number: int) -> None:
    with store.waiter(claim_of(number)) as waiter:
        waiter.ask()
        together.wait(20)


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


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While this is cleared, the resolver does not answer."""
    answers, real = threading.Event(), socket.getaddrinfo
    answers.set()

    def resolve(host: str, *arguments: Any, flags: int = 0, **options: Any) -> Any:
        if host == "localhost" and not flags & socket.AI_NUMERICHOST:
            answers.wait(30)
        return real(host, *arguments, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield answers
    answers.set()


def lasted(call: Callable[[], Any]) -> float:
    began = clock()
    call()
    return clock() - began


def test_a_resolver_that_hangs_costs_no_more_than_a_moment_where_addresses_are_known(
    proxy: Proxy, resolver: threading.Event
) -> None:
    store = RedisStore(f"redis://localhost:{proxy.port}/0", {})
    store.acquire(MINE)
    resolver.clear()
    proxy.cut()

    assert lasted(lambda: store.renew([MINE], 1.0)) < 1.0 + SLACK
    assert lasted(lambda: store.release(MINE, 1)) < 1.0 + SLACK
    assert store.holders(KEY) == []
    store.close()


def test_a_resolver_that_hangs_does_not_outlast_the_bound(valkey: Server, resolver: threading.Event) -> None:
    store = RedisStore(f"redis://localhost:{valkey.port}/1", {})
    resolver.clear()
    threads = _thread._count()

    for ask, bound in ((lambda: store.renew([MINE], 1.0), 1.0), (lambda: store.acquire(MINE), ACQUIRE_BOUND)):
        began = clock()
        with pytest.raises(StoreError, match="localhost"):
            ask()
        assert clock() - began < bound + SLACK
    # Those that hang do not pile up.
    assert _thread._count() <= threads + 2
    store.close()


def test_after_one_has_asked_in_vain_the_next_do_not_persist_until_there_is_an_answer() -> None:
    server = Server("valkey")
    store = RedisStore(server.url, {})
    of_a_task = replace(MINE, facts=Facts(task_id="a"))

    def refused(claim: Claim = of_a_task) -> None:
        with pytest.raises(StoreError):
            store.acquire(claim)

    assert lasted(lambda: refused(replace(of_a_task, patience=0.3))) < SLACK
    assert lasted(refused) > ACQUIRE_BOUND - SLACK
    assert max(lasted(refused) for _ in range(5)) < SLACK
    with suppress(StoreError):
        store.release(MINE, 1)
    assert lasted(refused) < SLACK
    # A `Lock` waits for as long as it says.
    assert lasted(lambda: refused(MINE)) > ACQUIRE_BOUND - SLACK

    server.start()
    assert isinstance(store.acquire(of_a_task), Grant)
    server.stop()
    assert lasted(refused) > ACQUIRE_BOUND - SLACK
    store.close()
    server.close()


def test_a_try_that_meets_a_connection_of_before_is_followed_by_another(valkey: Server) -> None:
    of_a_task = replace(MINE, facts=Facts(task_id="a"))
    with Proxy(valkey.port) as proxy:
        store = RedisStore(proxy.url, {})
        assert isinstance(store.acquire(of_a_task), Grant)
        store._asking._is_away = True
        proxy.cut()

        assert isinstance(store.acquire(of_a_task), Grant)
        store.release(of_a_task, 1)
        store.close()


@pytest.mark.parametrize("pack", [packing.pack_command, packing._pack_by_hand], ids=["as installed", "without hiredis"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_name_of_any_letters_is_one_key_in_each_encoding(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, encoding: str, pack: Any
) -> None:
    monkeypatch.setattr(packing, "pack_command", pack)
    store = RedisStore(valkey.url, {"encoding": encoding})
    claim = replace(MINE, key="singleton:v2:{größe:00}")

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
    # A busy machine would go by the address that another test has found.
    monkeypatch.setattr(names, "_known", {})

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        is_name = host == "localhost" and not options.get("flags")
        return real(leads_to[0] if is_name else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    store = RedisStore(f"redis://localhost:{valkey.port}/0", {})
    with pytest.raises(StoreError, match="refused"):
        store.renew([MINE], 1.0)

    leads_to[0] = "127.0.0.1"

    assert isinstance(store.acquire(MINE), Grant)
    store.close()
