"""A master of a cluster dies, hangs or is replaced, or a server is silent: who gets a lock when, and who keeps one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.records import RELEASED, Conflict, Grant
from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import ACQUIRE_BOUND, Store
from tests.clusters import Cluster, Node, clustered
from tests.contract.asking import Waiter
from tests.contract.chapters.hearing import hearing, publish
from tests.proxy import Proxy
from tests.replicas import wait_until_replicated
from tests.topologies.leases import (
    AT_ONCE,
    TTL,
    assert_that_the_next_grant_comes_soon,
    claim_of,
    connections,
    granted,
    held,
    opened,
    renewed_after,
    seconds_to_a_grant,
)
from tests.waiting import lasted, until

SLACK = 4.0
"""Seconds that a busy machine may take beside what is bounded."""
ENOUGH = 60
"""Names, so that each server has some."""


def names_at(cluster: Cluster, node: Node, number: int) -> list[int]:
    """So many names whose locks are at that server."""
    return [name for name in range(ENOUGH) if cluster.owner(claim_of(name).key) is node][:number]


def stop_replication(master: Node, replica: Node) -> None:
    """Let the replica connect to its master no more."""
    with replica.client() as client:
        client.config_set("masteruser", "nobody")
        client.config_set("masterauth", "wrong")
    with master.client() as client:
        client.client_kill_filter(_type="replica")
        until(lambda: client.info("replication")["connected_slaves"] == 0, "it is not connected")


def test_after_a_master_has_died_its_next_grant_comes_soon_its_leases_are_kept_and_the_others_notice_nothing(
    cluster_of_each_kind: Cluster, cleanup: ExitStack
) -> None:
    cluster = cluster_of_each_kind
    store = opened(cleanup, cluster.url)
    dead, alive, *_ = cluster.masters
    there, next_there, *_ = names_at(cluster, dead, 3)
    elsewhere = names_at(cluster, alive, 10)
    leases = [held(cleanup, store, there), held(cleanup, store, elsewhere.pop())]
    for name in elsewhere:
        granted(store, name)
    wait_until_replicated(dead, 1)

    def die() -> None:
        cluster.kill(dead)
        slowest = max(lasted(lambda name=name: store.acquire(claim_of(name))) for name in elsewhere)  # type: ignore[misc]
        assert slowest < AT_ONCE

    key = claim_of(next_there).key
    assert_that_the_next_grant_comes_soon(store, die, lambda: cluster.wait_for_another(key, dead), next_there)
    for lease in leases:
        renewed_after(lease, "it is renewed")
    assert isinstance(store.acquire(claim_of(there)), Conflict)


def test_a_master_that_hangs_is_as_good_as_dead(shaken_cluster: Cluster, cleanup: ExitStack) -> None:
    store = opened(cleanup, shaken_cluster.url)
    paused = shaken_cluster.masters[0]
    there, next_there = names_at(shaken_cluster, paused, 2)
    lease = held(cleanup, store, there)
    wait_until_replicated(paused, 1)

    def wait_for_another() -> float:
        return shaken_cluster.wait_for_another(claim_of(next_there).key, paused)

    # What a connection waits for a reply comes on top.
    assert_that_the_next_grant_comes_soon(
        store, lambda: shaken_cluster.pause(paused), wait_for_another, next_there, slack=1.0
    )
    renewed_after(lease, "it is renewed at the new master")


def test_a_failover_by_hand_costs_next_to_nothing(
    cluster_of_each_kind: Cluster, cleanup: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_of_each_kind
    store = opened(cleanup, cluster.url)
    before = cluster.masters[0]
    there, next_there = names_at(cluster, before, 2)
    lease = held(cleanup, store, there)
    wait_until_replicated(before, 1)
    after = cluster.fail_over(lease.key)

    assert seconds_to_a_grant(store, next_there) < AT_ONCE
    renewed_after(lease, "it is renewed at the new master")
    line = f"lock.moved store={store.address} master=127.0.0.1:{after.port} before=127.0.0.1:{before.port}"
    until(lambda: line in caplog.text, "it is told")
    with before.client() as client:
        until(lambda: connections(client) == 0, "nobody is connected to the old master")


def test_a_failover_by_hand_is_told_by_a_process_that_has_one_key_there(
    shaken_cluster: Cluster, cleanup: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(cleanup, shaken_cluster.url)
    before = shaken_cluster.masters[0]
    (only,) = names_at(shaken_cluster, before, 1)
    lease = held(cleanup, store, only)
    wait_until_replicated(before, 1)
    after = shaken_cluster.fail_over(lease.key)

    until(lambda: f"master=127.0.0.1:{after.port} before=127.0.0.1:{before.port}" in caplog.text, "it is told")
    renewed_after(lease, "it is renewed at the new master")
    with before.client() as client:
        until(lambda: connections(client) == 0, "nobody is connected to the old master")


def test_who_waits_at_a_master_that_dies_is_granted_at_the_next_one(
    shaken_cluster: Cluster, cleanup: ExitStack
) -> None:
    store = opened(cleanup, shaken_cluster.url)
    dead = shaken_cluster.masters[0]
    (name,) = names_at(shaken_cluster, dead, 1)
    store.acquire(claim_of(name, ttl=60.0))
    with Waiter(store, claim_of(name, token="waits")) as waiter:
        assert isinstance(waiter.ask(), float)
        wait_until_replicated(dead, 1)
        shaken_cluster.kill(dead)
        shaken_cluster.wait_for_another(claim_of(name).key, dead)
        waiter.sleep(20)
        assert isinstance(waiter.ask(), float)

        assert store.release(claim_of(name, ttl=60.0), 1) == RELEASED
        assert lasted(lambda: waiter.sleep(20)) < 5
        assert isinstance(waiter.ask(), Grant)


def test_a_listener_at_a_master_that_dies_listens_at_the_next_one(shaken_cluster: Cluster, cleanup: ExitStack) -> None:
    store = opened(cleanup, shaken_cluster.url)
    dead, other = shaken_cluster.masters[:2]
    here, there = (f"{claim_of(names_at(shaken_cluster, node, 1)[0]).key}:waits" for node in (dead, other))
    with hearing(store, here) as told, hearing(store, there) as others:
        shaken_cluster.kill(dead)
        shaken_cluster.wait_for_another(here, dead)

        until(lambda: told.count(LISTENING) > 1, "it listens at the new master", timeout=30)
        publish(store, here, "hello")
        until(lambda: "hello" in told, "it is heard")
        assert DEAF in told
        assert DEAF not in others


class Reached:
    """What leads to each server of a cluster, for a client that cannot reach them as they say."""

    def __init__(self, cluster: Cluster, cleanup: ExitStack) -> None:
        self.proxies = {node.port: cleanup.enter_context(Proxy(node.port)) for node in cluster.nodes}

    def __call__(self, address: tuple[str, int]) -> tuple[str, int]:
        host, port = address
        return host, self.proxies[port].port if port in self.proxies else port

    @property
    def url(self) -> str:
        return "redis+cluster://" + ";".join(f"127.0.0.1:{proxy.port}" for proxy in self.proxies.values())


@pytest.fixture
def reached(calm_cluster: Cluster, cleanup: ExitStack) -> Reached:
    calm_cluster.flush()
    return Reached(calm_cluster, cleanup)


@pytest.fixture
def behind(reached: Reached) -> Iterator[Store]:
    store = store_from_url(reached.url, {"address_remap": reached})
    yield store
    store.close()


def test_a_silent_server_harms_no_lease_and_no_call_of_another(
    calm_cluster: Cluster, reached: Reached, behind: Store, cleanup: ExitStack
) -> None:
    silent, *others = calm_cluster.masters
    # A long wait for one shall not outlast the short lease of another.
    short, long = names_at(calm_cluster, silent, 2)
    lost = [held(cleanup, behind, short, ttl=TTL), held(cleanup, behind, long, ttl=2 * TTL)]
    kept = [held(cleanup, behind, name, ttl=TTL) for node in others for name in names_at(calm_cluster, node, 3)]
    last = names_at(calm_cluster, others[0], 5)[-1]
    reached.proxies[silent.port].black_hole()
    least = TTL

    def are_lost() -> bool:
        nonlocal least
        least = min(least, *(lease.remaining() for lease in kept))
        return all(lease.lost for lease in lost)

    until(are_lost, "they are told as lost")
    assert least > TTL / 6
    assert lasted(lambda: behind.acquire(claim_of(last))) < AT_ONCE
    assert lasted(lambda: behind.release(claim_of(last), 1)) < AT_ONCE
    assert {lease.lost_reason for lease in lost} == {"unreachable"}
    assert not any(lease.lost for lease in kept)


def failing(call: Callable[[], Any]) -> StoreError:
    with pytest.raises(StoreError) as failed:
        call()
    return failed.value


def test_without_an_answer_of_any_server_each_call_ends_in_time(reached: Reached, behind: Store) -> None:
    for proxy in reached.proxies.values():
        proxy.black_hole()

    assert lasted(lambda: failing(lambda: behind.renew([claim_of("silent")], 1.0))) < 1.0 + SLACK
    assert lasted(lambda: failing(lambda: behind.acquire(claim_of("silent")))) < ACQUIRE_BOUND + SLACK
    told = str(failing(lambda: behind.acquire(claim_of("silent"))))
    assert "no server of the cluster says who has which slot" in told
    for proxy in reached.proxies.values():
        assert f"127.0.0.1:{proxy.port}: " in told


def test_a_cluster_that_is_down_is_asked_until_it_is_whole(cleanup: ExitStack) -> None:
    cluster = cleanup.enter_context(clustered("redis", replicas=0))
    store = opened(cleanup, cluster.url)
    down, up, *_ = cluster.masters
    (name,) = names_at(cluster, up, 1)
    cluster.kill(down)
    until(lambda: up.info["cluster_state"] == "fail", "it is down")

    told = failing(lambda: store.acquire(claim_of(name)))

    assert "cluster is down" in str(told)
