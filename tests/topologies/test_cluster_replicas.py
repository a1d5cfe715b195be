"""In a cluster each grant and each renewal counts once the replicas of that one server have it."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores.records import Claim, Grant, Renewal
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import ACQUIRE_BOUND, Store
from tests.clusters import Cluster, Node, clustered
from tests.replicas import go_on, halt
from tests.topologies.leases import answered, claim_of, leased, opened
from tests.topologies.test_cluster_failover import TTL, names_at, renewed_after, stop_replication
from tests.waiting import Watch, until

SLACK = 4.0
"""For a machine with other things to do."""


@pytest.fixture
def careful(cluster: Cluster, cleanup: ExitStack) -> Store:
    return opened(cleanup, cluster.url, replicas=1)


@pytest.fixture
def halted(cluster: Cluster, cleanup: ExitStack) -> Callable[[Node], None]:
    """Has the replica of a server acknowledge nothing until the test ends."""

    def halt_replica_of(master: Node) -> None:
        replica = cluster.replica_of(master)
        halt(replica)
        cleanup.callback(go_on, replica)

    return halt_replica_of


def until_at_replica(cluster: Cluster, claim: Claim) -> int:
    """The end of a lease, as the replica of its server knows it."""
    replica = cluster.replica_of(cluster.owner(claim.key))
    with replica.client() as client:
        connection = client.connection_pool.get_connection()
        try:
            connection.send_command("READONLY")
            connection.read_response()
            connection.send_command("HGET", claim.key, claim.token)
            return int(connection.read_response() or 0)
        finally:
            connection.disconnect()


def test_what_is_granted_or_renewed_is_at_the_replica_of_its_server_by_then(cluster: Cluster, careful: Store) -> None:
    claims = [claim_of(number, ttl=60.0) for number in range(12)]
    before = []
    for claim in claims:
        assert isinstance(careful.acquire(claim), Grant)
        before.append(until_at_replica(cluster, claim))

    assert careful.renew(claims, 5.0) == [Renewal.RENEWED] * len(claims)

    assert all(before)
    assert all(until_at_replica(cluster, claim) > old for claim, old in zip(claims, before, strict=True))


def test_a_grant_that_the_replica_of_its_server_does_not_have_is_none_and_others_are(
    cluster: Cluster, careful: Store, halted: Callable[[Node], None]
) -> None:
    lonely, other, *_ = cluster.masters
    mine, theirs = (claim_of(*names_at(cluster, node, 1), ttl=60.0) for node in (lonely, other))
    assert isinstance(careful.acquire(theirs), Grant)
    halted(lonely)

    with Watch() as watch, pytest.raises(StoreError) as unanswered:
        careful.acquire(mine)

    assert watch.seconds < ACQUIRE_BOUND + SLACK
    for words in ("acknowledged by 0 of its replicas", "singleton_lock_replicas=1", f"(127.0.0.1:{lonely.port})"):
        assert words in str(unanswered.value)
    assert careful.renew([theirs], 5.0) == [Renewal.RENEWED]


def test_a_cluster_without_replicas_is_told_at_the_start(cleanup: ExitStack) -> None:
    cluster = cleanup.enter_context(clustered("redis", replicas=0))
    store = opened(cleanup, cluster.url, replicas=1)

    with pytest.raises(StoreError, match="acknowledged by 0 of its replicas"):
        Inventory(store).self_test("singleton:v3:{trial:00}", 10.0)


def test_a_holder_whose_renewals_no_replica_has_has_ended_before_the_promoted_one_grants_to_another(
    shaken_cluster: Cluster, cleanup: ExitStack
) -> None:
    cluster = shaken_cluster
    careful, elsewhere = opened(cleanup, cluster.url, replicas=1), opened(cleanup, cluster.url)
    master = cluster.masters[0]
    (name,) = names_at(cluster, master, 1)
    lease = leased(careful, claim_of(name, token="held"))
    renewed_after(lease, "it is renewed, and its replica has that")
    # From now on only the master knows.
    replica = cluster.replica_of(master)
    stop_replication(master, replica)
    until(lambda: lease.remaining() < TTL * 2 / 3 - 0.5, "it would be renewed")
    cluster.kill(master)

    another = claim_of(name, token="another")
    until(lambda: isinstance(answered(lambda: elsewhere.acquire(another)), Grant), "another is granted", timeout=60)

    assert lease.remaining() == 0.0
    until(lambda: lease.lost, "it is told")
