"""What is told of a cluster: right, wrong, and what may heal."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from celery_singleton_lock import ConfigurationError
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import RELEASED, Conflict, Grant, Renewal
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.clusters import clustered
from tests.contract.asking import Waiter
from tests.contract.test_rights import RIGHTS as OF_ONE_SERVER
from tests.servers import certificate
from tests.topologies.leases import claim_of
from tests.topologies.test_sentinel_settings import ROOT, rights_in

SECRET = "hunter2"


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
