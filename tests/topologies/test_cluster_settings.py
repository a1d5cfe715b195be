"""What is told of a cluster: right, wrong, and what may heal."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from celery import Celery

from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.clusters import Cluster, clustered
from tests.contract.test_rights import RIGHTS as OF_ONE_SERVER
from tests.servers import certificate
from tests.topologies.test_sentinel_settings import ROOT, rights_in

AT_ONCE = 4.0
SECRET = "hunter2"


def claim_of(name: object) -> Claim:
    return Claim(f"singleton:v3:{{{name}:00}}", "token", 6.0)


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


# Rights, and TLS.

OTHERS = rights_in((ROOT / "docs/how-to/topologies.md").read_text(encoding="utf-8"), "shop", "Cluster")
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
    assert isinstance(store.acquire(mine), Grant)
    waiting = replace(mine, token="waits")
    assert isinstance(store.acquire(waiting), Conflict)
    with store.waiter(waiting) as waiter:
        assert isinstance(waiter.ask(), float)
    assert store.renew([mine], 1.0) == [Answer.DONE]
    assert store.release(mine, 1) is Answer.DONE
    store.close()
