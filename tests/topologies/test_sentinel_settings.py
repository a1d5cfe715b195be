"""What is told of a deployment with Sentinel: right, wrong, and what may heal."""

import logging
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, Lease, SingletonTask, StoreError
from celery_singleton_lock.settings import open_store, store_of
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Claim, Grant
from celery_singleton_lock.stores.redis import sentinel as of_sentinel
from tests.sentinels import NAME, Deployment, Sentinel
from tests.servers import FakeClock, Server, certificate, free_port, running
from tests.waiting import until

CLAIM = Claim("singleton:v3:{settings:00}", "token", 6.0)
IN_A_HURRY = replace(CLAIM, patience=1.0)
AT_ONCE = 4.0
ROOT = Path(__file__).parents[2]


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
    """What an acquire is told at once."""
    store, began = store_from_url(url, options), clock()
    with pytest.raises(ConfigurationError) as error:
        store.acquire(claim)
    assert clock() - began < AT_ONCE
    return in_one_line(error.value)


def unanswered(url: str) -> str:
    """What an acquire is told when it has no more time."""
    with pytest.raises(StoreError) as error:
        store_from_url(url).acquire(IN_A_HURRY)
    assert not isinstance(error.value, ConfigurationError)
    return in_one_line(error.value)


def in_one_line(error: Exception) -> str:
    told = str(error)
    assert "\n" not in told
    return told


# Which master.


def test_a_wrong_name_is_told_at_the_first_try(calm: Deployment) -> None:
    told = refused(calm.url.replace(NAME, "lokcs"))

    for words in ("lokcs", "No such master with that name", "master_name", "sentinel monitor", *calm.hosts):
        assert words in told


def test_a_name_that_one_sentinel_does_not_know_yet_is_waited_for(calm: Deployment, cleanup: ExitStack) -> None:
    knows_nothing = Sentinel("redis")
    cleanup.callback(knows_nothing.close)
    knows_nothing.start()

    told = unanswered(f"sentinel://127.0.0.1:{knows_nothing.port};127.0.0.1:{free_port()}/0?master_name={NAME}")

    assert "No such master" in told
    assert isinstance(store_from_url(url_of(knows_nothing, calm.sentinels[0])).acquire(CLAIM), Grant)


def test_no_sentinel_that_answers_is_one_line_with_all_of_them() -> None:
    ports = free_port(), free_port()

    told = unanswered(f"sentinel://127.0.0.1:{ports[0]};127.0.0.1:{ports[1]}/0?master_name={NAME}")

    assert f"no sentinel knows a master {NAME}" in told
    assert all(f"127.0.0.1:{port}: " in told for port in ports)
    assert "refused" in told
    assert "\n" not in told


def test_the_servers_in_place_of_the_sentinels_are_told_at_the_first_try(calm: Deployment) -> None:
    told = refused(url_of(*calm.servers))

    for words in ("SENTINEL", "name the sentinels", "26379"):
        assert words in told


def test_who_knows_of_the_last_failover_is_believed(cleanup: ExitStack, all_are_heard: None) -> None:
    old, new = (cleanup.enter_context(running("redis")) for _ in range(2))
    store = store_from_url(url_of(sentinel_of(cleanup, old, 3), sentinel_of(cleanup, new, 4)))

    assert isinstance(store.acquire(CLAIM), Grant)

    with new.client() as client:
        assert client.exists(CLAIM.key)
    store.close()


def test_a_new_master_whose_clock_differs_is_told_and_fences_grow(
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
    assert after.fence > before.fence
    assert [round(step) for step in steps] == [-30]
    store.close()


def test_a_server_that_is_no_master_is_not_taken_for_one(cleanup: ExitStack) -> None:
    server = cleanup.enter_context(running("redis"))
    sentinel = sentinel_of(cleanup, server)
    with server.client() as client:
        client.replicaof("127.0.0.1", server.port)

    assert "previous master is now a slave" in unanswered(url_of(sentinel))


def test_a_master_that_is_down_is_waited_for(cleanup: ExitStack) -> None:
    server = Server("redis")
    cleanup.callback(server.close)
    server.start()
    sentinel = sentinel_of(cleanup, server, 0, f"sentinel down-after-milliseconds {NAME} 200")
    server.stop()
    until(lambda: "s_down" in str(sentinel.ask("MASTER", NAME)), "it is seen")

    # A sentinel hopes anew each time that it connects.
    until(lambda: f"127.0.0.1:{server.port} is down" in unanswered(url_of(sentinel)), "it is told")


def test_while_the_last_master_is_down_the_one_before_is_not_believed_to_be_one(
    cleanup: ExitStack, all_are_heard: None
) -> None:
    old, new = cleanup.enter_context(running("redis")), Server("redis")
    cleanup.callback(new.close)
    new.start()
    late = sentinel_of(cleanup, old, 3)
    informed = sentinel_of(cleanup, new, 4, f"sentinel down-after-milliseconds {NAME} 1000")
    new.stop()
    until(lambda: "s_down" in str(informed.ask("MASTER", NAME)), "it is seen")

    unanswered(url_of(late, informed))

    with old.client() as client:
        assert not client.exists(CLAIM.key)


def test_a_sentinel_that_knows_too_few_others_is_not_believed(cleanup: ExitStack) -> None:
    server = cleanup.enter_context(running("redis"))
    url = url_of(sentinel_of(cleanup, server))

    with pytest.raises(StoreError, match="it knows of 0 others, and min_other_sentinels=1"):
        store_from_url(url, {"min_other_sentinels": 1}).acquire(IN_A_HURRY)


# User, password, database, TLS.


def test_user_password_and_database_are_the_masters(cleanup: ExitStack) -> None:
    server = cleanup.enter_context(running("redis"))
    sentinel = sentinel_of(cleanup, server)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "~*", "&*", "+@all")
    url = url_of(sentinel, database="3").replace("sentinel://", "sentinel://shop:secret@")
    store = store_from_url(url)

    assert isinstance(store.acquire(CLAIM), Grant)

    with server.client(3) as client:
        assert client.exists(CLAIM.key)
        assert "shop" in {one["user"] for one in client.client_list()}
    assert "secret" not in store.address
    assert store.address.endswith(f"/3?master_name={NAME}")
    store.close()


def rights_in(page: str, user: str, heading: str = "Sentinel") -> list[str]:
    """What a section of the page gives a user by `ACL SETUSER`."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"ACL SETUSER {user} ")]
    return line.split()[3:]


def test_the_rights_of_the_page_are_enough_and_needed(cleanup: ExitStack) -> None:
    page = (ROOT / "docs" / "topologies.md").read_text(encoding="utf-8")
    start = (ROOT / "docs" / "reference" / "start.md").read_text(encoding="utf-8")
    first, _, rest = start.partition("ACL SETUSER shop ")[2].partition("\n")
    of_shop = [*first.split(), *rest.partition("```")[0].split()]
    server = cleanup.enter_context(running("redis"))
    sentinel = sentinel_of(cleanup, server)
    with server.client() as client, sentinel.client() as at_sentinel:
        client.execute_command("ACL", "SETUSER", "shop", "reset", *of_shop)
        at_sentinel.execute_command("ACL", "SETUSER", "watcher", *rights_in(page, "watcher"))
        url = url_of(sentinel).replace("sentinel://", "sentinel://shop:secret@")
        kwargs = {"sentinel_kwargs": {"username": "watcher", "password": "watching"}}

        store = store_from_url(url, kwargs)
        store.try_out(f"{CLAIM.key}:trial", 1.0)
        assert isinstance(store.acquire(CLAIM), Grant)
        store.close()

        at_sentinel.execute_command("ACL", "SETUSER", "watcher", "-sentinel|master")
        told = refused(url, kwargs)
        for words in ("sentinel|master", "sentinel_kwargs"):
            assert words in told


def test_the_sentinels_have_a_password_of_their_own(cleanup: ExitStack) -> None:
    server = cleanup.enter_context(running("redis"))
    sentinel = sentinel_of(cleanup, server)
    with sentinel.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "resetpass", ">watching")

    told = refused(url_of(sentinel))
    for words in ("sentinel_kwargs", "password"):
        assert words in told
    wrong = refused(url_of(sentinel), {"sentinel_kwargs": {"password": "wr0ng"}})
    assert "wr0ng" not in wrong
    assert "sentinel_kwargs" in wrong
    right = store_from_url(url_of(sentinel), {"sentinel_kwargs": {"password": "watching"}})
    assert isinstance(right.acquire(CLAIM), Grant)
    right.close()


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


# The warning.


def test_a_ttl_that_does_not_outlast_a_failover_is_told_with_the_numbers(
    cleanup: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    server = cleanup.enter_context(running("redis"))
    url = url_of(sentinel_of(cleanup, server, 0, f"sentinel down-after-milliseconds {NAME} 30000"))
    store = store_from_url(url)
    lease = Lease(store, replace(CLAIM, ttl=3.0))
    assert lease.acquire() is None

    until(lambda: "lock.failover" in caplog.text, "it is told at the first renewal")
    lease.release()
    for ttl in (60.0, 3.0, 2.0):
        store.renew([replace(CLAIM, ttl=ttl)], 1.0)
    until(lambda: "ttl=2 " in caplog.text, "a shorter one is told as well")
    store.close()

    line, _ = [each.getMessage() for each in caplog.records if "lock.failover" in each.getMessage()]
    for words in (f"store={store.address}", "ttl=3 ", "down_after=30:", "32.5 s", "2.0 s", "lock_ttl to 49 or more"):
        assert words in line


def test_a_ttl_that_is_long_enough_is_not_told(shaken: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    store = store_from_url(shaken.url)
    store.renew([CLAIM], 1.0)
    store.try_out(f"{CLAIM.key}:trial", 1.0, [6.0])
    store.close()

    # What would be told comes from a thread.
    store.renew([replace(CLAIM, ttl=5.0)], 1.0)
    until(lambda: "lock.failover" in caplog.text, "the next one is told")
    assert "ttl=6 " not in caplog.text


def test_the_start_tells_of_the_shortest_ttl(cleanup: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    server = cleanup.enter_context(running("redis"))
    url = url_of(sentinel_of(cleanup, server))
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = url

    @app.task(base=SingletonTask, name="long", shared=False, lock_ttl=60)
    def long() -> None: ...

    @app.task(base=SingletonTask, name="short", shared=False, lock_ttl=20)
    def short() -> None: ...

    app.finalize()
    with caplog.at_level(logging.WARNING):
        long.delay()
        until(lambda: "lock.failover" in caplog.text, "it is told")
    store_of(app).close()

    (line,) = [each.getMessage() for each in caplog.records if "lock.failover" in each.getMessage()]
    # Sentinel's own default.
    assert "ttl=20 down_after=30:" in line


def test_a_worker_does_not_start_with_a_wrong_name(calm: Deployment) -> None:
    program = (
        "from celery import Celery\n"
        "from celery_singleton_lock import SingletonTask\n"
        f"app = Celery('shop', broker={calm.url.partition('/0?')[0]!r})\n"
        "app.conf.broker_transport_options = {'master_name': 'lokcs'}\n"
        "@app.task(base=SingletonTask)\n"
        "def task(): ...\n"
        "app.worker_main(['worker', '--pool', 'solo'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert "lock.misconfigured: " in done.stderr
    assert "No such master with that name" in done.stderr
