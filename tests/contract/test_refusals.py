"""Servers that say no, and who we are to them: what passes is waited for, the rest is told with what to set."""

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from redis import CredentialProvider

from celery_singleton_lock import ConfigurationError, Lock, StoreError
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import RELEASED, Claim, Grant, Renewal
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.test_bounds import KEY, MINE, outcome_of
from tests.proxy import Proxy
from tests.replicas import replicated
from tests.servers import SERVERS, Server, certificate, free_port, running
from tests.waiting import Watch, until

OTHER = Claim("singleton:v3:{other:00}", "b", 30.0)
AT_ONCE = 4.0
"""Far less than the bound of an acquire, on a machine with other things to do."""


def wants_replicas(client: Any) -> Callable[[], Any]:
    client.config_set("min-replicas-to-write", 1)
    return lambda: client.config_set("min-replicas-to-write", 0)


def is_a_replica(client: Any) -> Callable[[], Any]:
    client.replicaof("127.0.0.1", 1)
    return lambda: client.replicaof("NO", "ONE")


@pytest.mark.parametrize("refuses", [wants_replicas, is_a_replica])
def test_a_refusal_that_passes_is_waited_for(own: Server, refuses: Callable[[Any], Callable[[], Any]]) -> None:
    store = Store(own.url, {})
    store.acquire(OTHER)
    with own.client() as client:
        accept = refuses(client)
        threading.Timer(0.5, accept).start()

        answer = store.acquire(MINE)

        assert isinstance(answer, Grant)
        assert store.renew([MINE], 1.0) == [Renewal.RENEWED]


@pytest.mark.prove
@pytest.mark.parametrize("kind", SERVERS)
def test_an_address_that_has_moved_is_followed_although_the_old_server_still_answers(kind: str) -> None:
    with replicated(kind, 1) as (old, (new,)), Proxy(old.port) as proxy:
        store = Store(proxy.url, {})
        store.acquire(OTHER)
        store.renew([OTHER], 1.0)
        with old.client() as master, new.client() as replica:
            replica.replicaof("NO", "ONE")
            proxy.move(new.port)
            master.replicaof("127.0.0.1", new.port)
            until(lambda: master.info("replication")["master_link_status"] == "up", "it replicates")

        with Watch() as watch:
            assert isinstance(store.acquire(MINE), Grant)
            assert store.renew([MINE], 1.0) == [Renewal.RENEWED]
            assert store.release(MINE, 1) == RELEASED
        assert watch.seconds < AT_ONCE
        with new.client() as client:
            assert not client.exists(KEY)


RIGHTS = {
    "evalsha": "~* +@all -evalsha",
    "select": "~* +@all -select",
    "hlen": "~* +evalsha +eval +select +time",
    "key": "~shop:* +@all",
}


@pytest.mark.parametrize("missing", RIGHTS)
def test_a_missing_right_is_told_at_the_first_try_with_the_setting(own: Server, missing: str) -> None:
    with own.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", *RIGHTS[missing].split())
        store = Store(f"redis://shop:secret@127.0.0.1:{own.port}/1", {})
        before = client.info("stats")["total_connections_received"]

        with Watch() as watch, pytest.raises(ConfigurationError) as refused:
            store.acquire(MINE)

        assert client.info("stats")["total_connections_received"] == before + 1
    assert watch.seconds < AT_ONCE
    for words in ("singleton_lock_url", "user shop", "ACL SETUSER", store.address):
        assert words in str(refused.value)
    if missing != "hlen" or own.kind == "valkey":
        assert missing in str(refused.value)
    assert "secret" not in str(refused.value) + repr(refused.value)


NEVER = {
    "database": ((), "/99", ("DB index", "the first is /0", "singleton_lock_url")),
    "select": (("--cluster-enabled", "yes"), "/1", ("SELECT", "redis+cluster://")),
    "command": (
        ("--rename-command", "EVALSHA", ""),
        "/0",
        ("unknown command", "EVALSHA", "rename-command", "sentinel://"),
    ),
    "wait": (("--rename-command", "WAIT", ""), "/0", ("unknown command", "leave singleton_lock_replicas at 0")),
    "command in a script": (("--rename-command", "HSET", ""), "/0", ("nknown", "rename-command")),
    "option of a command": (
        ("--rename-command", "PEXPIRE", "OTHER", "--rename-command", "PERSIST", "PEXPIRE"),
        "/0",
        ("7.0 or newer",),
    ),
    "type": ((), "/0", ("WRONGTYPE", "singleton_lock_prefix")),
}


@pytest.mark.prove
@pytest.mark.parametrize("never", NEVER)
def test_what_a_server_can_never_do_is_told_at_the_first_try(never: str) -> None:
    arguments, database, words = NEVER[never]
    cluster_port = ("--cluster-port", str(free_port())) if never == "select" else ()
    with running("redis", *arguments, *cluster_port) as server:
        if never == "type":
            with server.client() as client:
                client.set(KEY, "somebody else's")

        with Watch() as watch, pytest.raises(ConfigurationError) as refused:
            Store(server.url.removesuffix("/0") + database, {}, replicas=int(never == "wait")).acquire(MINE)

    assert watch.seconds < AT_ONCE
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("user", ["", ":wr0ng-secret@", "nobody:wr0ng-secret@"])
def test_a_wrong_or_missing_password_is_told_at_the_first_try_with_the_setting(own: Server, user: str) -> None:
    with own.client() as client:
        client.config_set("requirepass", "right-secret")
        store = Store(f"redis://{user}127.0.0.1:{own.port}/0", {})
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


TLS_FAULTS = {
    "key of another certificate": ({"ssl_keyfile": "other/key.pem"}, "ssl_keyfile"),
    "a certificate that is none": ({"ssl_certfile": "junk.pem"}, "ssl_certfile"),
    "a key without its certificate": ({"ssl_certfile": None}, "ssl_certfile"),
    "authorities that are none": ({"ssl_ca_certs": None, "ssl_ca_data": "junk"}, "ssl_ca_certs"),
    "a version as text": ({"ssl_min_version": "TLSv1.2"}, "ssl_"),
}


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

    with Watch() as watch, pytest.raises(StoreError) as refused:
        Store(url, options).acquire(MINE)

    assert isinstance(refused.value, ConfigurationError)
    assert watch.seconds < AT_ONCE
    assert setting in refused.value.advice
    assert "singleton_lock_client_options" in refused.value.advice
    assert "s3cret" not in str(refused.value) + repr(refused.value)
    # With the frames that have its socket.
    del refused
    gc.collect()


@pytest.mark.prove
def test_a_url_without_tls_at_a_port_with_tls_and_the_contrary_are_told(with_tls: tuple[str, Path, Path]) -> None:
    url, _, _ = with_tls
    with running("valkey") as plain:
        for wrong, hint in (
            (url.replace("rediss", "redis"), "If this port is one with TLS, its URL begins with rediss, not redis"),
            (plain.url.replace("redis", "rediss"), "If this port has no TLS, its URL begins with redis, not rediss"),
        ):
            asks: list[Callable[[Store], Any]] = [
                lambda one: one.acquire(MINE),
                lambda one: Inventory(one).latency(1.0),
            ]
            for ask in asks:
                with closing(Store(wrong, {})) as store, pytest.raises(StoreError) as away:
                    ask(store)
                assert f". {hint}" in str(away.value)
                assert ".." not in str(away.value)


# Early versions of redis-py do not close it.
@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_socket_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    end = outcome_of(lambda store: store.acquire(MINE), Store(f"unix://{tmp_path}/socket", {}))

    assert not end.is_answered
    assert end.by_the_clock > AT_ONCE


def test_a_holder_whose_password_is_changed_ends_like_one_whose_store_is_away(own: Server) -> None:
    """Its body must not fail over what is settled without it."""
    store, lock = Store(own.url, {}), Lock("stock", url=own.url)
    lease = lock.acquire()
    with own.client() as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)

        lease.release()
        client.config_set("requirepass", "")
        until(lambda: not store.holders(lock.key), "it is released in the background")


def test_a_host_that_can_be_none_is_told_as_any_other() -> None:
    for host in ("a..b", "x" * 70):
        with pytest.raises(StoreError, match="host name is not valid"):
            Store(f"redis://{host}:1/0", {}).acquire(replace(MINE, patience=0.2))


class Tokens(CredentialProvider):
    def __init__(self, token: str = "first") -> None:
        self.token = token
        self.is_away = False
        self.asked = 0

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        if self.is_away:
            raise KeyError(self.token)
        return "shop", self.token


def take_only(server: Server, token: str) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", "resetpass", f">{token}", "~singleton:*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "on", "nopass", "~*", "&*", "+@all")


def assert_that_all_works(store: Store) -> None:
    assert isinstance(store.acquire(MINE), Grant)
    assert store.renew([MINE], 5.0) == [Renewal.RENEWED]
    assert store.release(MINE, 1) == RELEASED


def test_a_token_that_is_replaced_is_asked_for_again(own: Server) -> None:
    take_only(own, "first")
    provider = Tokens()
    store = Store(own.url, {"credential_provider": provider})
    assert_that_all_works(store)
    take_only(own, "second")
    provider.token = "second"
    with own.client() as client:
        # As a service does when a token expires.
        client.client_kill_filter(user="shop")

    assert_that_all_works(store)
    assert provider.asked == 2
    store.close()


def test_a_token_that_is_not_taken_is_told_at_the_first_try(own: Server) -> None:
    take_only(own, "another")
    provider = Tokens("s3cret")

    with Watch() as watch, pytest.raises(ConfigurationError) as refused:
        Store(own.url, {"credential_provider": provider}).acquire(MINE)

    assert watch.seconds < AT_ONCE
    assert provider.asked == 1
    assert "let credential_provider give a user and a password that the server takes" in str(refused.value)
    assert "s3cret" not in str(refused.value) + repr(refused.value)


def test_a_provider_that_fails_is_as_good_as_a_store_that_is_away(own: Server) -> None:
    take_only(own, "s3cret")
    provider = Tokens("s3cret")
    provider.is_away = True
    store = Store(own.url, {"credential_provider": provider})

    with pytest.raises(StoreError, match="credential_provider has failed with KeyError") as unanswered:
        store.renew([MINE], 2.0)
    assert not isinstance(unanswered.value, ConfigurationError)
    assert "s3cret" not in str(unanswered.value)

    provider.is_away = False
    assert_that_all_works(store)
    store.close()


@pytest.mark.prove
@pytest.mark.parametrize("url", ["redis+socket://{path}?virtual_host=3", "unix://{path}?db=3", "unix://{path}"])
def test_a_socket_with_a_user_and_a_database(url: str, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with running("redis", "--unixsocket", str(path)) as server:
        take_only(server, "first")
        app = Celery("shop", backend=url.format(path=path), set_as_current=False)
        app.conf.update(redis_username="shop", redis_password="first", redis_db=3)
        store = store_of(app)
        Inventory(store).self_test(f"{KEY}:trial", 5.0)
        assert isinstance(store.acquire(MINE), Grant)
        with server.client(3) as client:
            assert client.exists(KEY)
        store.close()


@pytest.mark.prove
def test_a_server_that_asks_for_certificates_is_reached_by_the_settings_of_celery(
    with_tls: tuple[str, Path, Path],
) -> None:
    url, own, key = with_tls
    ours = {"ssl_ca_certs": str(own), "ssl_certfile": str(own), "ssl_keyfile": str(key)}
    of_celery = {**ours, "ssl_cert_reqs": "CERT_REQUIRED"}
    in_the_url = "&".join(f"{name}={value}" for name, value in of_celery.items())
    for settings in (
        {"result_backend": url, "redis_backend_use_ssl": of_celery},
        {"result_backend": f"{url}?{in_the_url}"},
        {"broker_url": url, "broker_use_ssl": of_celery},
        {"broker_url": f"{url}?{in_the_url}"},
        {"singleton_lock_url": url, "singleton_lock_client_options": ours},
        {"singleton_lock_url": f"valkeys{url.removeprefix('rediss')}?{in_the_url}"},
    ):
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.update(settings)
        store = store_of(app)
        assert_that_all_works(store)
        store.close()
