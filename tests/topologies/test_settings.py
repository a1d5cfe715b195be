"""What is told of a deployment with Sentinel, or of a cluster: right, wrong, and what may heal."""

import os
import signal
import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import CredentialProvider

from celery_singleton_lock import ConfigurationError, StoreError
from celery_singleton_lock.definition.settings import open_store
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import RELEASED, Claim, Conflict, Grant, Renewal
from celery_singleton_lock.stores.redis import sentinel as of_sentinel
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.clusters import clustered
from tests.contract.asking import Waiter
from tests.contract.test_rights import RIGHTS as OF_ONE_SERVER
from tests.sentinels import NAME, Deployment, Sentinel
from tests.servers import FakeClock, Server, certificate, free_port, running
from tests.topologies.leases import claim_of
from tests.waiting import Watch, until

CLAIM = Claim("singleton:v3:{settings:00}", "token", 6.0)
AT_ONCE = 4.0

ROOT = Path(__file__).parents[2]
TOPOLOGIES = (ROOT / "docs" / "how-to" / "topologies.md").read_text(encoding="utf-8")


@pytest.fixture
def all_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sentinel is too late with its answer, however busy the machine is."""
    monkeypatch.setattr(of_sentinel, "_PATIENCE", 1.0)


def sentinel_of(cleanup: ExitStack, server: Server, epoch: int = 0, *more: str) -> Sentinel:
    """One that watches *server* alone, since that failover."""
    lines = (f"sentinel monitor {NAME} 127.0.0.1 {server.port} 1", f"sentinel config-epoch {NAME} {epoch}", *more)
    sentinel = Sentinel("redis", *lines)
    cleanup.callback(sentinel.close)
    sentinel.start()
    until(lambda: len(sentinel.ask("MASTERS")) == 1, "it knows the master")
    return sentinel


def url_of(*sentinels: Server, name: str = NAME, database: str = "0") -> str:
    return f"sentinel://{';'.join(f'127.0.0.1:{one.port}' for one in sentinels)}/{database}?master_name={name}"


def refused(url: str, options: dict[str, Any] | None = None, claim: Claim = CLAIM) -> str:
    store = store_from_url(url, options)
    with Watch() as watch, pytest.raises(ConfigurationError) as error:
        store.acquire(claim)
    assert watch.seconds < AT_ONCE
    return in_one_line(error.value)


def in_one_line(error: Exception) -> str:
    told = str(error)
    assert "\n" not in told
    return told


def test_a_wrong_name_is_told_at_the_first_try(calm: Deployment) -> None:
    told = refused(calm.url.replace(NAME, "lokcs"))

    for words in ("lokcs", "No such master with that name", "master_name", "sentinel monitor", *calm.hosts):
        assert words in told


def test_a_new_master_whose_clock_differs_is_told(
    cleanup: ExitStack, all_are_heard: None, wall_clock: FakeClock
) -> None:
    wall_clock.step("-30")
    old = cleanup.enter_context(running("redis"))
    new = cleanup.enter_context(running("valkey", env=wall_clock.env))
    late, informed = sentinel_of(cleanup, old, 3), sentinel_of(cleanup, new, 4)
    os.kill(informed.pid, signal.SIGSTOP)
    store, steps = store_from_url(url_of(late, informed)), list[float]()
    store.on_clock_step = steps.append
    before = store.acquire(CLAIM)
    os.kill(informed.pid, signal.SIGCONT)

    def at_the_new_one() -> Any:
        """The grant, once the sentinel that was silent is asked again."""
        store.close()
        grant = store.acquire(CLAIM)
        with new.client() as client:
            return client.exists(CLAIM.key) and grant

    after = until(at_the_new_one, "the store follows")
    assert isinstance(before, Grant)
    assert isinstance(after, Grant)
    until(lambda: store.acquire(CLAIM) and steps, "the clocks are compared")
    assert [round(step) for step in steps] == [-30]
    store.close()


@pytest.mark.clients
def test_master_and_sentinels_speak_tls(cleanup: ExitStack, tmp_path: Path) -> None:
    own, key = certificate(tmp_path)
    files = ("--tls-cert-file", own, "--tls-key-file", key, "--tls-ca-cert-file", own, "--tls-auth-clients", "no")
    arguments = tuple(map(str, files))
    tls_port, sentinel_tls_port = free_port(), free_port()
    server = cleanup.enter_context(running("redis", *arguments, "--tls-port", str(tls_port)))
    lines = [f"{name.removeprefix('--')} {value}" for name, value in zip(arguments[::2], arguments[1::2], strict=True)]
    more = (*lines, "tls-replication yes", f"tls-port {sentinel_tls_port}")
    sentinel = Sentinel("redis", f"sentinel monitor {NAME} 127.0.0.1 {tls_port} 1", *more)
    cleanup.callback(sentinel.close)
    sentinel.start()
    url = f"sentinel://127.0.0.1:{sentinel_tls_port}/0"
    with_tls = {"ssl": True, "ssl_ca_certs": str(own)}
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        broker_use_ssl={"ssl_cert_reqs": "CERT_REQUIRED", "ssl_ca_certs": str(own)},
        broker_transport_options={"master_name": NAME, "sentinel_kwargs": with_tls},
    )

    for store in (open_store(app), store_from_url(url, {"master_name": NAME, "sentinel_kwargs": with_tls, **with_tls})):
        assert isinstance(store.acquire(replace(CLAIM, token=str(id(store)), limit=2)), Grant)
        store.close()
    with server.client() as client:
        assert client.exists(CLAIM.key)
    told = refused(url, {"master_name": NAME, "sentinel_kwargs": {"ssl": True}, **with_tls})
    for words in ("CERTIFICATE", "sentinel_kwargs", "ssl_ca_certs"):
        assert words in told


@pytest.mark.clients
def test_what_answers_and_is_no_sentinel_is_told_as_what_it_is(cleanup: ExitStack) -> None:
    listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))

    def answer() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    while connection.recv(4096):
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    threading.Thread(target=answer, daemon=True).start()
    port = listener.getsockname()[1]
    store = store_from_url(f"sentinel://127.0.0.1:{port}/0?master_name={NAME}")

    with pytest.raises(StoreError) as unanswered:
        store.renew([CLAIM], 1.0)

    told = in_one_line(unanswered.value)
    assert f"127.0.0.1:{port}: " in told
    assert "protocol error" in told.lower()
    assert "credential" not in told
    listener.shutdown(socket.SHUT_RDWR)


class Away(CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        raise LookupError("s3cret")


def test_a_provider_of_the_sentinels_that_fails_is_told(calm: Deployment) -> None:
    store = store_from_url(calm.url, {"sentinel_kwargs": {"credential_provider": Away()}})

    with pytest.raises(StoreError, match="credential_provider has failed with LookupError") as unanswered:
        store.renew([CLAIM], 1.0)
    assert "s3cret" not in str(unanswered.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("rediss://127.0.0.1:{}/0?ssl_ca_certs={}", {}),
        ("rediss+cluster://127.0.0.1:{}?ssl_ca_certs={}", {}),
        ("sentinel://127.0.0.1:{}/0?master_name=locks", {"sentinel_kwargs": {"ssl": True}}),
    ],
)
@pytest.mark.clients
def test_a_certificate_of_another_host_is_refused_unless_allowed(
    tmp_path: Path, url: str, options: dict[str, Any]
) -> None:
    own, key = certificate(tmp_path, "DNS:another.example")
    port = free_port()
    files = ("--tls-cert-file", str(own), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    for kwargs in options.values():
        kwargs["ssl_ca_certs"] = str(own)
    with running("redis", "--tls-port", str(port), *files):
        assert "CERTIFICATE" in refused(url.format(port, own), options)

        (options.get("sentinel_kwargs") or options)["ssl_check_hostname"] = False
        with suppress(ConfigurationError):
            store = store_from_url(url.format(port, own), options)
            assert isinstance(store.acquire(CLAIM), Grant), "or it is no cluster, or no sentinel"
            store.close()


def rights_in(page: str, user: str, heading: str = "Sentinel") -> list[str]:
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"ACL SETUSER {user} ")]
    return line.split()[3:]


def test_the_rights_of_the_page_are_enough_and_needed(cleanup: ExitStack) -> None:
    start = (ROOT / "docs" / "reference" / "start.md").read_text(encoding="utf-8")
    first, _, rest = start.partition("ACL SETUSER shop ")[2].partition("\n")
    of_shop = [*first.split(), *rest.partition("```")[0].split()]
    server = cleanup.enter_context(running("redis"))
    sentinel = sentinel_of(cleanup, server)
    with server.client() as client, sentinel.client() as at_sentinel:
        client.execute_command("ACL", "SETUSER", "shop", "reset", *of_shop)
        at_sentinel.execute_command("ACL", "SETUSER", "watcher", *rights_in(TOPOLOGIES, "watcher"))
        url = url_of(sentinel).replace("sentinel://", "sentinel://shop:secret@")
        kwargs = {"sentinel_kwargs": {"username": "watcher", "password": "watching"}}

        store = store_from_url(url, kwargs)
        Inventory(store).self_test(f"{CLAIM.key}:trial", 1.0)
        assert isinstance(store.acquire(CLAIM), Grant)
        store.close()

        at_sentinel.execute_command("ACL", "SETUSER", "watcher", "-sentinel|masters")
        told = refused(url, kwargs)
        for words in ("sentinel|masters", "sentinel_kwargs"):
            assert words in told


SECRET = "hunter2"


OTHERS = rights_in(TOPOLOGIES, "shop", "Cluster")
INSTEAD_OF = ("+publish", "+subscribe", "+unsubscribe", "+select")
RIGHTS = ("reset", *[right for right in OF_ONE_SERVER if right not in INSTEAD_OF], *OTHERS, f">{SECRET}")


@pytest.mark.clients
def test_a_cluster_with_tls(tmp_path: Path, cleanup: ExitStack) -> None:
    own, key = certificate(tmp_path)
    files = ("--tls-cert-file", str(own), "--tls-key-file", str(key), "--tls-ca-cert-file", str(own))
    cluster = cleanup.enter_context(clustered("redis", tls=(*files, "--tls-auth-clients", "no"), replicas=0))
    store = store_from_url(f"rediss+cluster://127.0.0.1:{cluster.nodes[0].tls_port}?ssl_ca_certs={own}")
    cleanup.callback(store.close)

    for number in range(10):
        assert isinstance(store.acquire(claim_of(number)), Grant)


def test_a_user_with_the_rights_that_the_docs_list_can_do_all(cleanup: ExitStack) -> None:
    cluster = cleanup.enter_context(clustered("redis", replicas=0))
    for node in cluster.nodes:
        with node.client() as client:
            client.execute_command("ACL SETUSER", "shop", *RIGHTS)
    store = store_from_url(f"redis+cluster://shop:{SECRET}@{cluster.hosts[0]}")
    mine = claim_of("rights")
    cluster.begin_to_move(mine.key)

    Inventory(store).self_test("singleton:v3:{trial:00}", 5.0)
    for node in cluster.nodes:
        with node.client() as client:
            client.execute_command("ACL SETUSER", "shop", "-hrandfield")
            with pytest.raises(ConfigurationError, match=f"{node.port}.*'hrandfield'"):
                Inventory(store).self_test("singleton:v3:{trial:00}", 5.0)
            client.execute_command("ACL SETUSER", "shop", "+hrandfield")
    assert isinstance(store.acquire(mine), Grant)
    waiting = replace(mine, token="waits")
    assert isinstance(store.acquire(waiting), Conflict)
    with Waiter(store, waiting) as waiter:
        assert isinstance(waiter.ask(), float)
    assert store.renew([mine], 1.0) == [Renewal.RENEWED]
    assert store.release(mine, 1) == RELEASED
    store.close()
