"""Sentinel's master dies, hangs or is replaced: who gets a lock when, and who keeps one."""

from contextlib import ExitStack

import pytest

from celery_singleton_lock import StoreError
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Grant
from celery_singleton_lock.stores.redis.listener import DEAF, LISTENING
from celery_singleton_lock.stores.redis.store import ACQUIRE_BOUND, Store
from tests.contract.chapters.hearing import CHANNEL, hearing, publish
from tests.proxy import Proxy
from tests.replicas import halt, wait_until_replicated
from tests.sentinels import NAME, Deployment, deployed
from tests.topologies.leases import (
    AT_ONCE,
    TTL,
    answered,
    assert_that_the_next_grant_comes_soon,
    claim_of,
    connections,
    held,
    leased,
    opened,
    renewed_after,
    seconds_to_a_grant,
)
from tests.waiting import Watch, until

SILENT_RENEWAL = 6.5
LAST_WRITE = 3.0
"""Seconds after which a master that is cut off refuses, if its replicas may lag for one: it counts full seconds, once
in a second."""
OVERLAP = LAST_WRITE + TTL / 3 + 0.5
"""Seconds for which two may hold a lock: the last renewal before the cut is replicated, and none after it."""


def assert_that_the_next_one_grants_soon(store: Store, deployment: Deployment) -> None:
    dead = deployment.master
    assert_that_the_next_grant_comes_soon(store, dead.stop, lambda: deployment.wait_for_another(dead))
    assert deployment.master is not dead


@pytest.mark.clients
def test_after_the_master_has_died_the_next_grant_comes_soon_and_held_leases_are_kept(
    of_each_kind: Deployment, cleanup: ExitStack
) -> None:
    store = opened(cleanup, of_each_kind.url)
    lease = held(cleanup, store)
    wait_until_replicated(of_each_kind.master, 2)

    assert_that_the_next_one_grants_soon(store, of_each_kind)
    renewed_after(lease, "it is renewed at the new master")

    with of_each_kind.master.client() as client:
        assert client.exists(lease.key)


def test_a_master_that_hangs_is_as_good_as_dead(shaken: Deployment, cleanup: ExitStack) -> None:
    store = opened(cleanup, shaken.url)
    lease = held(cleanup, store)
    wait_until_replicated(shaken.master, 2)
    hanging = shaken.master

    # Of the time, one second is what a connection waits for a reply.
    assert_that_the_next_grant_comes_soon(
        store, lambda: halt(hanging), lambda: shaken.wait_for_another(hanging), slack=1.0
    )
    renewed_after(lease, "it is renewed at the new master")


def test_a_failover_by_hand_costs_next_to_nothing(of_each_kind: Deployment, cleanup: ExitStack) -> None:
    store = opened(cleanup, of_each_kind.url)
    lease = held(cleanup, store)
    wait_until_replicated(of_each_kind.master, 2)
    before = of_each_kind.master
    of_each_kind.fail_over()

    assert seconds_to_a_grant(store) < AT_ONCE
    with before.client() as client:
        until(lambda: connections(client) == 0, "nobody is connected to the old master")
    renewed_after(lease, "it is renewed at the new master")
    with of_each_kind.master.client() as client:
        assert client.exists(lease.key)


@pytest.mark.clients
def test_a_listener_listens_at_the_new_master(shaken: Deployment, cleanup: ExitStack) -> None:
    store = opened(cleanup, shaken.url)
    with hearing(store) as told:
        before = shaken.master
        before.stop()
        shaken.wait_for_another(before)

        until(lambda: told.count(LISTENING) > 1, "it listens at the new master", timeout=30)
        publish(store, CHANNEL, "hello")
        until(lambda: "hello" in told, "it is heard")
    assert DEAF in told


def silenced(cleanup: ExitStack, deployment: Deployment, number: int) -> tuple[str, list[Proxy]]:
    """The URL of a deployment of which so many sentinels can be silenced."""
    proxies = [cleanup.enter_context(Proxy(sentinel.port)) for sentinel in deployment.sentinels[:number]]
    hosts = [f"127.0.0.1:{proxy.port}" for proxy in proxies] + deployment.hosts[number:]
    return f"sentinel://{';'.join(hosts)}/0?master_name={NAME}", proxies


def test_without_an_answer_of_any_sentinel_each_call_ends_in_time(calm: Deployment, cleanup: ExitStack) -> None:
    url, proxies = silenced(cleanup, calm, 3)
    for proxy in proxies:
        proxy.black_hole()
    store = opened(cleanup, url)

    with Watch() as watch, pytest.raises(StoreError) as unanswered:
        store.renew([claim_of("silent")], 1.0)
    assert watch.seconds < SILENT_RENEWAL

    with Watch() as watch, pytest.raises(StoreError):
        store.acquire(claim_of("silent"))
    assert watch.seconds < ACQUIRE_BOUND + 6.0
    for proxy in proxies:
        assert f"127.0.0.1:{proxy.port}: " in str(unanswered.value)
    assert f"no sentinel knows a master {NAME}" in str(unanswered.value)


def test_a_master_that_is_cut_off_refuses_if_the_operator_has_said_so(cleanup: ExitStack) -> None:
    careful = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
    deployment = cleanup.enter_context(deployed("redis", *careful, behind=Proxy))
    assert deployment.front is not None
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
