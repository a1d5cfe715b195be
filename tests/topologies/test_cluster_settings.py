"""What is told of a cluster: right, wrong, and what may heal."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import ConfigurationError, StoreError
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant
from tests.clusters import Cluster, Node, clustered
from tests.contract.test_rights import RIGHTS as OF_ONE_SERVER
from tests.servers import Server, certificate, free_port
from tests.topologies.test_sentinel_settings import ROOT, rights_in

AT_ONCE = 4.0
SECRET = "hunter2"


def claim_of(name: object) -> Claim:
    return Claim(f"singleton:v3:{{{name}:00}}", "token", 6.0)


IN_A_HURRY = replace(claim_of("settings"), patience=1.0)


# As users spell it.


def test_an_app_whose_locks_are_in_a_cluster(calm_cluster: Cluster) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update(broker_url="memory://", singleton_lock_url=calm_cluster.url)
    calm_cluster.flush()

    for number in range(10):
        assert isinstance(store_of(app).acquire(claim_of(number)), Grant)
    assert store_of(app).address == calm_cluster.url
    store_of(app).close()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis+cluster://one", "redis+cluster://one:6379"),
        ("redis+cluster://one:1;two:2", "redis+cluster://one:1;two:2"),
        ("redis+cluster://one:1/0;redis+cluster://two:2/0", "redis+cluster://one:1;two:2"),
        (f"redis+cluster://shop:{SECRET}@one:1;two:2", "redis+cluster://one:1;two:2"),
        (f"rediss+cluster://:{SECRET}@[::1]:1;one:1?ssl_cert_reqs=none", "rediss+cluster://[::1]:1;one:1"),
        ("redis+cluster://one:1;one:1", "redis+cluster://one:1"),
    ],
)
def test_how_a_cluster_may_be_named(url: str, address: str) -> None:
    store = store_from_url(url)

    assert store.address == address


WRONG = {
    "a database": ("redis+cluster://one:1/1", {}, ("database 1", "database 0 alone", "singleton_lock_prefix")),
    "a database of a later part": ("redis+cluster://one:1;two:2/3", {}, ("database 3", "database 0 alone")),
    "a database in the query": ("redis+cluster://one:1?db=4", {}, ("database 4", "database 0 alone")),
    "a database in the options": ("redis+cluster://one:1", {"db": 5}, ("database 5", "database 0 alone")),
    "schemes that are mixed": (
        "redis+cluster://one:1;redis://two:2",
        {},
        ("redis://", "one cluster", "host:port;host"),
    ),
    "tls for a part": ("redis+cluster://one:1;rediss+cluster://two:2", {}, ("rediss+cluster://", "one cluster")),
    "a comma": ("redis+cluster://one:1,two:2", {}, ("host:port",)),
    "no host": ("redis+cluster://", {}, ("host:port;host:port",)),
    "a port that is none": ("redis+cluster://one:port", {}, ("cannot be read",)),
    "a remap that is none": ("redis+cluster://one:1", {"address_remap": "two"}, ("address_remap", "(host, port)")),
    "an option that is none": ("redis+cluster://one:1", {"retries": 3}, ("redis+cluster://one:1", "retries")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_work_is_told_before_anything_is_sent(wrong: str) -> None:
    url, options, words = WRONG[wrong]

    with pytest.raises(ConfigurationError) as refused:
        store_from_url(url, options)

    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


# What the servers say.


def refused_at_once(store: Any, claim: Claim) -> str:
    began = clock()
    with pytest.raises(ConfigurationError) as refused:
        store.acquire(claim)
    assert clock() - began < AT_ONCE
    return str(refused.value)


def test_a_single_server_of_a_cluster_says_what_to_set(calm_cluster: Cluster) -> None:
    one, other, *_ = calm_cluster.masters
    claim = next(each for each in map(claim_of, range(100)) if calm_cluster.owner(each.key) is other)

    told = refused_at_once(store_from_url(one.url), claim)

    assert "set singleton_lock_url='redis+cluster://host:port'" in told
    assert "one of a cluster" in told


def test_the_start_finds_a_single_server_of_a_cluster_whatever_slot_it_tries(calm_cluster: Cluster) -> None:
    one, *_ = calm_cluster.masters
    keys = [key for key in (claim_of(f"start{number}").key for number in range(100)) if calm_cluster.owner(key) is one]
    store = store_from_url(one.url)

    for key in keys[:10]:
        with pytest.raises(ConfigurationError, match="one of a cluster"):
            store.try_out(key, 5.0)
    store.close()


def test_a_server_that_is_in_no_cluster_says_what_to_set(redis_process: Server) -> None:
    told = refused_at_once(store_from_url(f"redis+cluster://127.0.0.1:{redis_process.port}"), claim_of("alone"))

    assert "it is in no cluster: let singleton_lock_url begin with redis://" in told


def test_a_wrong_password_is_told_at_the_first_try(cleanup: ExitStack) -> None:
    cluster = cleanup.enter_context(clustered("redis", replicas=0))
    for node in cluster.nodes:
        with node.client() as client:
            client.config_set("requirepass", SECRET)
    store = store_from_url(f"redis+cluster://:wrong-secret@{cluster.hosts[0]}")

    told = refused_at_once(store, claim_of("secret"))

    assert "password of the user default" in told
    assert "wrong-secret" not in told
    right = store_from_url(f"redis+cluster://:{SECRET}@{cluster.hosts[0]};{cluster.hosts[1]}")
    for number in range(10):
        assert isinstance(right.acquire(claim_of(number)), Grant)
    right.close()


def test_no_server_that_answers_is_told_with_each_that_was_asked() -> None:
    ports = free_port(), free_port()
    store = store_from_url(f"redis+cluster://127.0.0.1:{ports[0]};127.0.0.1:{ports[1]}")

    with pytest.raises(StoreError, match="no server of the cluster says who has which slot") as unanswered:
        store.acquire(IN_A_HURRY)

    assert not isinstance(unanswered.value, ConfigurationError)
    for port in ports:
        assert f"127.0.0.1:{port}: " in str(unanswered.value)


def test_a_server_that_knows_of_no_other_is_passed_over(calm_cluster: Cluster, cleanup: ExitStack) -> None:
    lonely = Node("redis")
    cleanup.callback(lonely.close)
    lonely.start()
    store = store_from_url(f"redis+cluster://127.0.0.1:{lonely.port};{calm_cluster.hosts[0]}")
    calm_cluster.flush()

    assert isinstance(store.acquire(claim_of("passed over")), Grant)
    store.close()


def test_addresses_that_cannot_be_translated_are_told(calm_cluster: Cluster) -> None:
    known: dict[str, str] = {}
    store = store_from_url(calm_cluster.url, {"address_remap": lambda address: (known[address[0]], address[1])})

    told = refused_at_once(store, claim_of("translated"))

    assert "address_remap has failed for ('127.0.0.1', " in told
    assert "KeyError" in told


# Rights, and TLS.

OTHERS = rights_in((ROOT / "docs/topologies.md").read_text(encoding="utf-8"), "shop", "Cluster")
INSTEAD_OF = ("+publish", "+subscribe", "+select")
RIGHTS = ("reset", *[right for right in OF_ONE_SERVER if right not in INSTEAD_OF], *OTHERS, f">{SECRET}")
"""Of the pages."""


def test_a_user_with_the_rights_that_the_docs_list_can_do_all(cleanup: ExitStack) -> None:
    cluster = cleanup.enter_context(clustered("redis", replicas=0))
    for node in cluster.nodes:
        with node.client() as client:
            client.execute_command("ACL SETUSER", "shop", *RIGHTS)
    store = store_from_url(f"redis+cluster://shop:{SECRET}@{cluster.hosts[0]}")
    mine = claim_of("rights")
    cluster.begin_to_move(mine.key)

    store.try_out("singleton:v3:{trial:00}", 5.0)
    assert isinstance(store.acquire(mine), Grant)
    waiting = replace(mine, token="waits")
    assert isinstance(store.acquire(waiting), Conflict)
    with store.waiter(waiting) as waiter:
        assert isinstance(waiter.ask(), float)
    assert store.renew([mine], 1.0) == [Answer.DONE]
    assert store.release(mine, 1) is Answer.DONE
    store.close()


def test_a_right_that_lacks_at_one_server_is_told_when_it_is_tried_out(cleanup: ExitStack) -> None:
    cluster = cleanup.enter_context(clustered("redis", replicas=0))
    for number, node in enumerate(cluster.nodes):
        with node.client() as client:
            client.execute_command("ACL SETUSER", "shop", *RIGHTS, *(["-hlen"] if number == 1 else []))
    store = store_from_url(f"redis+cluster://shop:{SECRET}@{cluster.hosts[0]}")

    with pytest.raises(ConfigurationError, match=r"hlen.*ACL SETUSER") as refused:
        store.try_out("singleton:v3:{trial:00}", 5.0)

    assert store.address in str(refused.value)


@pytest.mark.parametrize("right", [right[1:] for right in RIGHTS if right.startswith("+")])
def test_a_right_that_lacks_is_told_when_it_is_tried_out(calm_cluster: Cluster, right: str) -> None:
    user = f"lacks-{right.replace('|', '-')}"
    for node in calm_cluster.masters:
        with node.client() as client:
            client.execute_command("ACL SETUSER", user, *RIGHTS, f"-{right}")
    store = store_from_url(f"redis+cluster://{user}:{SECRET}@{calm_cluster.hosts[0]}")

    with pytest.raises(ConfigurationError) as refused:
        store.try_out(f"singleton:v3:{{{user}:00}}", 30.0)

    assert "ACL SETUSER" in str(refused.value)
    assert f"'{right}'" in str(refused.value)


def test_a_cluster_with_tls(tmp_path: Path, cleanup: ExitStack) -> None:
    own, key = certificate(tmp_path)
    files = ("--tls-cert-file", str(own), "--tls-key-file", str(key), "--tls-ca-cert-file", str(own))
    cluster = cleanup.enter_context(clustered("redis", tls=(*files, "--tls-auth-clients", "no"), replicas=0))
    store = store_from_url(f"rediss+cluster://127.0.0.1:{cluster.nodes[0].tls_port}?ssl_ca_certs={own}")
    cleanup.callback(store.close)

    for number in range(10):
        assert isinstance(store.acquire(claim_of(number)), Grant)
