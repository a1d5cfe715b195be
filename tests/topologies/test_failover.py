"""A master dies, hangs, is replaced or falls silent: who gets a lock when, and who keeps one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import ACQUIRE_BOUND, RELEASED, Claim, Conflict, Grant
from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import Store
from tests.clusters import Cluster, clustered
from tests.contract.asking import Waiter
from tests.contract.chapters.hearing import hearing, publish
from tests.proxy import Proxy
from tests.replicas import wait_until_replicated
from tests.sentinels import NAME, Deployment, deployed
from tests.topologies.leases import (
    AT_ONCE,
    ENOUGH,
    TTL,
    Topology,
    answered,
    assert_that_the_next_grant_comes_soon,
    claim_of,
    connections,
    granted,
    held,
    leased,
    names_at,
    opened,
    renewed_after,
    seconds_to_a_grant,
)
from tests.waiting import Watch, lasted, until

SLACK = 4.0
LAST_WRITE = 3.0
"""Seconds after which a master that is cut off refuses, if its replicas may lag for one: it counts full seconds, once
in a second."""
OVERLAP = LAST_WRITE + TTL / 3 + 0.5
"""Seconds for which two may hold a lock: the last renewal before the cut is replicated, and none after it."""


@pytest.mark.clients
def test_after_a_master_has_died_its_next_grant_comes_soon_its_leases_are_kept_and_the_others_notice_nothing(
    of_each_kind: Topology, cleanup: ExitStack
) -> None:
    topology, store = of_each_kind, opened(cleanup, of_each_kind.url)
    dead = topology.masters[0]
    there, next_there = names_at(topology, dead, 2)
    elsewhere = [name for name in range(ENOUGH) if topology.owner(claim_of(name).key) is not dead][:10]
    leases = [held(cleanup, store, name) for name in (there, *elsewhere[:1])]
    for name in elsewhere[1:]:
        granted(store, name)
    wait_until_replicated(dead, topology.replicas)

    def die() -> None:
        topology.kill(dead)
        for name in elsewhere[1:]:
            assert lasted(lambda name=name: store.acquire(claim_of(name))) < AT_ONCE  # type: ignore[misc]

    assert_that_the_next_grant_comes_soon(store, topology, dead, die, next_there)
    for lease in leases:
        renewed_after(lease, "it is renewed")
    assert isinstance(store.acquire(claim_of(there)), Conflict)


def test_a_master_that_hangs_is_as_good_as_dead(of_each_topology: Topology, cleanup: ExitStack) -> None:
    topology, store = of_each_topology, opened(cleanup, of_each_topology.url)
    paused = topology.masters[0]
    there, next_there = names_at(topology, paused, 2)
    lease = held(cleanup, store, there)
    wait_until_replicated(paused, topology.replicas)

    # What a connection waits for a reply comes on top.
    assert_that_the_next_grant_comes_soon(
        store, topology, paused, lambda: topology.pause(paused), next_there, slack=1.0
    )
    renewed_after(lease, "it is renewed at the new master")


def test_a_failover_by_hand_costs_next_to_nothing_and_is_told_by_each_process_though_it_has_one_key_there(
    of_each_kind: Topology, cleanup: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    topology, store, another = of_each_kind, *(opened(cleanup, of_each_kind.url) for _ in range(2))
    before = topology.masters[0]
    there, only, next_there = names_at(topology, before, 3)
    leases = [held(cleanup, store, there), held(cleanup, another, only)]
    wait_until_replicated(before, topology.replicas)
    after = topology.fail_over(leases[0].key)

    assert seconds_to_a_grant(store, next_there) < AT_ONCE
    for lease in leases:
        renewed_after(lease, "it is renewed at the new master")
    line = f"lock.moved store={store.address} master=127.0.0.1:{after.port} before=127.0.0.1:{before.port}"
    until(lambda: caplog.text.count(line) >= 2, "it is told")
    with before.client() as client:
        until(lambda: connections(client) == 0, "nobody is connected to the old master")
    assert isinstance(store.acquire(claim_of(there)), Conflict)


def test_who_waits_at_a_dying_master_is_granted_at_the_next(of_each_topology: Topology, cleanup: ExitStack) -> None:
    topology, store = of_each_topology, opened(cleanup, of_each_topology.url)
    dead = topology.masters[0]
    (name,) = names_at(topology, dead, 1)
    store.acquire(claim_of(name, ttl=60.0))
    with Waiter(store, claim_of(name, token="waits")) as waiter:
        assert isinstance(waiter.ask(), float)
        wait_until_replicated(dead, topology.replicas)
        topology.kill(dead)
        topology.wait_for_another(dead)
        waiter.sleep(20)
        assert isinstance(waiter.ask(), float)

        assert store.release(claim_of(name, ttl=60.0), 1) == RELEASED
        assert lasted(lambda: waiter.sleep(20)) < 5
        assert isinstance(waiter.ask(), Grant)


@pytest.mark.clients
def test_a_listener_at_a_dying_master_listens_at_the_next(of_each_topology: Topology, cleanup: ExitStack) -> None:
    topology, store = of_each_topology, opened(cleanup, of_each_topology.url)
    dead = topology.masters[0]
    channels = [f"{claim_of(*names_at(topology, node, 1)).key}:waits" for node in topology.masters]
    told, *others = [cleanup.enter_context(hearing(store, channel)) for channel in channels]
    topology.kill(dead)
    topology.wait_for_another(dead)

    until(lambda: told.count(LISTENING) > 1, "it listens at the new master", timeout=30)
    publish(store, channels[0], "hello")
    until(lambda: "hello" in told, "it is heard")
    assert DEAF in told
    assert not any(DEAF in each for each in others)


def failing(call: Callable[[], Any], within: float) -> str:
    with Watch() as watch, pytest.raises(StoreError) as failed:
        call()
    assert watch.seconds < within
    return str(failed.value)


def test_without_an_answer_of_any_sentinel_each_call_ends_in_time(calm: Deployment, cleanup: ExitStack) -> None:
    proxies = [cleanup.enter_context(Proxy(sentinel.port)) for sentinel in calm.sentinels]
    for proxy in proxies:
        proxy.black_hole()
    hosts = [f"127.0.0.1:{proxy.port}" for proxy in proxies]
    store = opened(cleanup, f"sentinel://{';'.join(hosts)}/0?master_name={NAME}")

    told = failing(lambda: store.renew([claim_of("silent")], 1.0), within=6.5)
    failing(lambda: store.acquire(claim_of("silent")), within=ACQUIRE_BOUND + 6.0)
    assert all(f"{host}: " in told for host in hosts)
    assert f"no sentinel knows a master {NAME}" in told


def test_a_master_that_is_cut_off_refuses_if_the_operator_has_said_so(cleanup: ExitStack) -> None:
    careful = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
    deployment = cleanup.enter_context(deployed("redis", *careful, behind=Proxy))
    # As one that reaches the old master, and no sentinel.
    on_its_side, elsewhere = opened(cleanup, deployment.servers[0].url), opened(cleanup, deployment.url)
    told_at: list[float] = []
    lease = leased(on_its_side, claim_of("cut off"), on_lost=lambda *_: told_at.append(clock()))
    renewed_after(lease, "it is renewed before")
    deployment.front.black_hole()

    other = Claim(lease.key, "another token", TTL)
    until(lambda: answered(lambda: isinstance(elsewhere.acquire(other), Grant)), "the other side grants", timeout=60)
    granted_at = clock()

    until(lambda: told_at, "the holder on its side is told")
    assert lease.lost_reason == "unreachable"
    assert told_at[0] - granted_at < OVERLAP


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


def test_without_an_answer_of_any_server_each_call_ends_in_time(reached: Reached, behind: Store) -> None:
    for proxy in reached.proxies.values():
        proxy.black_hole()

    failing(lambda: behind.renew([claim_of("silent")], 1.0), within=1.0 + SLACK)
    told = failing(lambda: behind.acquire(claim_of("silent")), within=ACQUIRE_BOUND + SLACK)
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

    assert "cluster is down" in failing(lambda: store.acquire(claim_of(name)), within=ACQUIRE_BOUND + SLACK)
