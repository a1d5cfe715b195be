"""Servers that say no: what passes is waited for, what never passes is told at once with what to set."""

import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_singleton_lock import ConfigurationError, Lock, StoreError
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, clock
from celery_singleton_lock.stores.records import Answer, Claim, Grant
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.contract.test_bounds import KEY, MINE, outcome_of
from tests.proxy import Proxy
from tests.servers import SERVERS, Server, certificate, free_port, running
from tests.waiting import until

OTHER = Claim("singleton:v3:{other:00}", "b", 30.0)
AT_ONCE = 4.0
"""Far less than the bound of an acquire, on a machine with other things to do."""


@pytest.fixture(params=SERVERS)
def own(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each kind that belongs to one test, which may mistreat it."""
    with running(request.param) as server:
        yield server


# What passes.


def wants_replicas(client: Any) -> Callable[[], Any]:
    client.config_set("min-replicas-to-write", 1)
    return lambda: client.config_set("min-replicas-to-write", 0)


def is_a_replica(client: Any) -> Callable[[], Any]:
    client.replicaof("127.0.0.1", 1)
    return lambda: client.replicaof("NO", "ONE")


def is_a_replica_without_its_master(client: Any) -> Callable[[], Any]:
    client.config_set("replica-serve-stale-data", "no")
    return is_a_replica(client)


@pytest.mark.parametrize("refuses", [wants_replicas, is_a_replica, is_a_replica_without_its_master])
def test_a_refusal_that_passes_is_waited_for(own: Server, refuses: Callable[[Any], Callable[[], Any]]) -> None:
    store = RedisStore(own.url, {})
    store.acquire(OTHER)
    with own.client() as client:
        accept = refuses(client)
        threading.Timer(0.5, accept).start()

        answer = store.acquire(MINE)

        assert isinstance(answer, Grant)
        assert store.renew([MINE], 1.0) == [Answer.DONE]


@pytest.mark.prove
def test_a_cluster_that_is_not_there_yet_is_waited_for() -> None:
    cluster = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with running("redis", *cluster) as server, server.client() as client:
        store = RedisStore(server.url, {})
        threading.Timer(0.5, lambda: client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)).start()

        assert isinstance(store.acquire(MINE), Grant)
        # It has all slots, so it may be used without a word about clusters.
        store.try_out(f"{KEY.removesuffix('}')}:trial}}", 5.0)


@contextmanager
def failed_over(kind: str) -> Iterator[tuple[Proxy, Server, Server, Callable[[], None]]]:
    """A master behind a proxy, its replica, and what makes them change places."""
    with (
        running(kind) as old,
        running(kind) as new,
        Proxy(old.port) as proxy,
        old.client() as master,
        new.client() as replica,
    ):

        def follow(follower: Any, leader: Server) -> None:
            follower.replicaof("127.0.0.1", leader.port)
            until(lambda: follower.info("replication")["master_link_status"] == "up", "it replicates")

        def fail_over() -> None:
            replica.replicaof("NO", "ONE")
            proxy.move(new.port)
            follow(master, new)

        follow(replica, old)
        yield proxy, old, new, fail_over


@pytest.mark.prove
@pytest.mark.parametrize("kind", SERVERS)
def test_an_address_that_has_moved_is_followed_although_the_old_server_still_answers(kind: str) -> None:
    with failed_over(kind) as (proxy, _, new, fail_over):
        store = RedisStore(proxy.url, {})
        store.acquire(OTHER)
        store.renew([OTHER], 1.0)
        fail_over()
        began = clock()

        assert isinstance(store.acquire(MINE), Grant)
        assert store.renew([MINE], 1.0) == [Answer.DONE]
        assert store.release(MINE, 1) == Answer.DONE
        assert clock() - began < AT_ONCE
        with new.client() as client:
            assert not client.exists(KEY)


@pytest.mark.prove
def test_a_conflict_is_not_believed_of_a_server_that_is_no_master_any_more() -> None:
    with failed_over("valkey") as (proxy, old, new, fail_over):
        store, elsewhere = RedisStore(proxy.url, {}), RedisStore(new.url, {})
        store.acquire(OTHER)
        other = Claim(OTHER.key, "c", 30.0)
        fail_over()
        with old.client() as master:
            # So it does not hear of the release.
            master.replicaof("127.0.0.1", 1)
        elsewhere.release(OTHER, 1)

        assert isinstance(store.acquire(other), Grant)


@pytest.mark.prove
def test_who_waits_behind_an_address_that_has_moved_is_woken_by_the_new_server() -> None:
    with failed_over("valkey") as (proxy, old, new, fail_over):
        store, elsewhere = RedisStore(proxy.url, {}), RedisStore(new.url, {})
        store.acquire(MINE)
        slept: list[float] = []
        with store.waiter(Claim(KEY, "waiter", 30.0)) as waiter, old.client() as master:
            seconds = waiter.ask()
            assert isinstance(seconds, float)
            fail_over()

            def sleep() -> None:
                began = clock()
                waiter.sleep(seconds)
                slept.append(clock() - began)

            sleeper = threading.Thread(target=sleep)
            sleeper.start()
            # Somebody else in the process finds out.
            store.acquire(OTHER)

            sleeper.join(20)
            assert slept[0] < 10
            assert isinstance(waiter.ask(), float)
            assert not [one for one in master.client_list() if int(one["sub"])]
            elsewhere.release(MINE, 1)
            waiter.sleep(seconds)
            assert isinstance(waiter.ask(), Grant)


# What never passes.


RIGHTS = {
    "evalsha": "~* +@all -evalsha",
    "select": "~* +@all -select",
    "hlen": "~* +evalsha +eval +select +time",
    "key": "~shop:* +@all",
}
"""What is missing in the rights of a user, and the rights."""


@pytest.mark.parametrize("missing", RIGHTS)
def test_a_missing_right_is_told_at_the_first_try_with_the_setting(own: Server, missing: str) -> None:
    with own.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *RIGHTS[missing].split())
        store = RedisStore(f"redis://shop:secret@127.0.0.1:{own.port}/1", {})
        began, before = clock(), client.info("stats")["total_connections_received"]

        with pytest.raises(ConfigurationError) as refused:
            store.acquire(MINE)

        assert client.info("stats")["total_connections_received"] == before + 1
    assert clock() - began < AT_ONCE
    for words in ("singleton_lock_url", "user shop", "ACL SETUSER", store.address):
        assert words in str(refused.value)
    if missing != "hlen" or own.kind == "valkey":
        assert missing in str(refused.value)
    assert "secret" not in str(refused.value) + repr(refused.value)


def wrong_type(client: Any) -> None:
    client.set(KEY, "somebody else's")


NEVER = {
    "database": ((), "/99", ("DB index", "counts from /0", "singleton_lock_url")),
    "select": (("--cluster-enabled", "yes"), "/1", ("SELECT", "redis+cluster://")),
    "command": (
        ("--rename-command", "EVALSHA", ""),
        "/0",
        ("unknown command", "EVALSHA", "rename-command", "sentinel://"),
    ),
    "command in a script": (("--rename-command", "HSET", ""), "/0", ("nknown", "rename-command")),
    "type": ((), "/0", ("WRONGTYPE", "singleton_lock_prefix")),
}
"""What a server is started with, what is asked of it, and what is told of its answer."""


@pytest.mark.prove
@pytest.mark.parametrize("never", NEVER)
def test_what_a_server_can_never_do_is_told_at_the_first_try(never: str) -> None:
    arguments, database, words = NEVER[never]
    cluster_port = ("--cluster-port", str(free_port())) if never == "select" else ()
    with running("redis", *arguments, *cluster_port) as server:
        if never == "type":
            with server.client() as client:
                wrong_type(client)
        began = clock()

        with pytest.raises(ConfigurationError) as refused:
            RedisStore(server.url.removesuffix("/0") + database, {}).acquire(MINE)

    assert clock() - began < AT_ONCE
    for word in words:
        assert word in str(refused.value)


@pytest.mark.prove
def test_a_password_is_not_told_by_a_server_that_knows_no_passwords() -> None:
    with running("redis", "--rename-command", "AUTH", "") as server:
        store = RedisStore(f"redis://shop:s3cret@127.0.0.1:{server.port}/0", {})

        with pytest.raises(ConfigurationError) as refused:
            store.acquire(MINE)

    assert "'AUTH'" in str(refused.value)
    assert "s3cret" not in str(refused.value) + repr(refused.value)


@pytest.mark.parametrize("user", ["", ":wr0ng-secret@", "nobody:wr0ng-secret@"])
def test_a_wrong_or_missing_password_is_told_at_the_first_try_with_the_setting(own: Server, user: str) -> None:
    with own.client() as client:
        client.config_set("requirepass", "right-secret")
        store = RedisStore(f"redis://{user}127.0.0.1:{own.port}/0", {})
        before = client.info("stats")["total_connections_received"]

        with pytest.raises(ConfigurationError) as refused:
            store.acquire(MINE)

        assert client.info("stats")["total_connections_received"] == before + 1
    for words in ("singleton_lock_url", "singleton_lock_client_options", "password", store.address):
        assert words in str(refused.value)
    assert "wr0ng-secret" not in str(refused.value) + repr(refused.value)


@pytest.fixture
def with_tls(tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """The URL of a server that wants to know who comes; its certificate, which vouches for itself; its key."""
    own, key = certificate(tmp_path)
    port = free_port()
    files = ("--tls-cert-file", str(own), "--tls-key-file", str(key), "--tls-ca-cert-file", str(own))
    with running("redis", "--tls-port", str(port), *files):
        yield f"rediss://127.0.0.1:{port}/0", own, key


# Early versions of redis-py do not close the socket.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.prove
def test_a_certificate_that_is_wrong_or_missing_is_told_at_the_first_try(with_tls: tuple[str, Path, Path]) -> None:
    url, own, key = with_tls
    for options in (
        {},
        {"ssl_ca_certs": "nowhere.pem"},
        {"ssl_ca_certs": str(own)},
    ):
        began = clock()
        with pytest.raises(ConfigurationError) as refused:
            RedisStore(url, options).acquire(MINE)
        # A write that fails may hide what the server has said, and then the next try tells.
        assert clock() - began < ACQUIRE_BOUND
        for words in ("ssl_ca_certs", "singleton_lock_client_options"):
            assert words in str(refused.value)

    right = {"ssl_ca_certs": str(own), "ssl_certfile": str(own), "ssl_keyfile": str(key)}
    assert isinstance(RedisStore(url, right).acquire(MINE), Grant)


TLS_FAULTS = {
    "key of another certificate": ({"ssl_keyfile": "other/key.pem"}, "ssl_keyfile"),
    "a certificate that is none": ({"ssl_certfile": "junk.pem"}, "ssl_certfile"),
    "a key without its certificate": ({"ssl_certfile": None}, "ssl_certfile"),
    "authorities that are none": ({"ssl_ca_certs": None, "ssl_ca_data": "junk"}, "ssl_ca_certs"),
    "unknown ciphers": ({"ssl_ciphers": "NOPE"}, "ssl_ciphers"),
    "a version as text": ({"ssl_min_version": "TLSv1.2"}, "ssl_"),
}
"""What is given in place of what is right, and what is told."""


# redis-py does not close its socket then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.prove
@pytest.mark.parametrize("fault", TLS_FAULTS)
def test_tls_that_can_never_work_is_told_with_its_setting(
    with_tls: tuple[str, Path, Path], tmp_path: Path, fault: str
) -> None:
    url, own, key = with_tls
    (tmp_path / "junk.pem").write_text("s3cret")
    (tmp_path / "other").mkdir()
    certificate(tmp_path / "other")
    given, setting = TLS_FAULTS[fault]
    if not given.keys() <= inspect.signature(redis.SSLConnection).parameters.keys():
        pytest.skip("redis-py 5.0 has no such option")
    wrong = {name: str(tmp_path / value) if name.endswith("file") and value else value for name, value in given.items()}
    options = {"ssl_ca_certs": str(own), "ssl_certfile": str(own), "ssl_keyfile": str(key), **wrong}
    began = clock()

    with pytest.raises(StoreError) as refused:
        RedisStore(url, options).acquire(MINE)

    assert isinstance(refused.value, ConfigurationError)
    assert clock() - began < (AT_ONCE)
    assert setting in refused.value.advice
    assert "singleton_lock_client_options" in refused.value.advice
    assert "s3cret" not in str(refused.value) + repr(refused.value)
    # With the frames that have its socket.
    del refused
    gc.collect()


@pytest.mark.prove
def test_a_port_that_speaks_tls_or_not_is_told_as_what_it_may_be(
    with_tls: tuple[str, Path, Path], redis_process: Server
) -> None:
    hasty = replace(MINE, patience=1.5)
    for url, hint in (
        (with_tls[0].replace("rediss", "redis"), "begins with rediss"),
        (redis_process.url.replace("redis", "rediss"), "begins with redis, not rediss"),
    ):
        with pytest.raises(StoreError) as unanswered:
            RedisStore(url, {"ssl_cert_reqs": "none"} if "rediss" in url else {}).acquire(hasty)

        assert hint in unanswered.value.problem
        # A server that goes down looks the same, so it may pass.
        assert not isinstance(unanswered.value, ConfigurationError)


@pytest.mark.prove
@pytest.mark.parametrize("asks_where", [subprocess.DEVNULL, subprocess.PIPE])
def test_nobody_is_asked_for_the_password_of_a_key(
    with_tls: tuple[str, Path, Path], tmp_path: Path, asks_where: int
) -> None:
    url, own, key = with_tls
    locked = tmp_path / "locked.pem"
    lock = f"openssl rsa -aes256 -in {key} -out {locked} -passout pass:s3cret"
    subprocess.run(lock.split(), check=True, capture_output=True)
    script = """
import sys
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Claim
url, own, key = sys.argv[1:]
tls = {"ssl_ca_certs": own, "ssl_certfile": own, "ssl_keyfile": key}
print(type(store_from_url(url, {**tls, "ssl_password": "s3cret"}).acquire(Claim("k:{k:0}", "a", 30.0))).__name__)
store_from_url(url, tls).acquire(Claim("k:{k:1}", "a", 30.0, patience=0.5))
"""
    command = [sys.executable, "-c", script, url, str(own), str(locked)]
    # Otherwise OpenSSL asks on the terminal of whoever runs this.
    with subprocess.Popen(
        command, stdin=asks_where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        try:
            process.wait(20)
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read().split() == ["Grant"]
        assert "ssl_password" in process.stderr.read()


def test_a_host_that_can_be_none_is_told_as_any_other() -> None:
    for host in ("a..b", "x" * 70):
        with pytest.raises(StoreError, match="cannot be one of a host"):
            RedisStore(f"redis://{host}:1/0", {}).acquire(replace(MINE, patience=0.2))


# redis-py does not close its socket then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_option_with_which_redis_py_stumbles_is_told_without_its_value(own: Server) -> None:
    options = {"socket_keepalive_options": {"s3cret": "s3cret"}, "socket_keepalive": True}

    with pytest.raises(ConfigurationError) as refused:
        RedisStore(own.url, options).acquire(MINE)

    assert "singleton_lock_client_options" in str(refused.value)
    assert "TypeError" in str(refused.value)
    assert "s3cret" not in str(refused.value) + repr(refused.value)
    # With the frames that have its socket.
    del refused
    gc.collect()


# Early versions of redis-py do not close it.
@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_socket_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    answered, seconds = outcome_of(lambda store: store.acquire(MINE), RedisStore(f"unix://{tmp_path}/socket", {}))

    assert not answered
    assert seconds > AT_ONCE


def test_a_holder_whose_password_is_changed_ends_like_one_whose_store_is_away(own: Server) -> None:
    """Its body must not fail over what is settled without it."""
    store, lock = RedisStore(own.url, {}), Lock("stock", url=own.url)
    lease = lock.acquire()
    assert lease is not None
    with own.client() as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)

        lease.release()
        client.config_set("requirepass", "")
        until(lambda: not store.holders(lock.key), "it is released in the background")
