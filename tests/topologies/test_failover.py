"""Sentinel's master dies, hangs or is replaced: who gets a lock when, and who keeps one."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from celery_singleton_lock import Lease, StoreError
from celery_singleton_lock.stores.base import ACQUIRE_BOUND, Store, clock
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Grant
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.proxy import Proxy
from tests.sentinels import NAME, Deployment, deployed
from tests.topologies.conftest import store_at
from tests.waiting import until

TTL = 6.0
NEXT_GRANT = 3.5
"""Seconds from the death of a master to the next grant, if it is taken for dead after one."""
AT_ONCE = 2.0
SILENT_RENEWAL = 2.5
LAST_WRITE = 3.0
"""Seconds after which a master that is cut off refuses, if its replicas may lag for one: it counts full seconds, once
in a second."""
OVERLAP = LAST_WRITE + TTL / 3 + 0.5
"""Seconds for which two may hold a lock: the last renewal before the cut is replicated, and none after it."""


def claim_of(name: str, ttl: float = TTL) -> Claim:
    return Claim(f"singleton:v3:{{{name}:00}}", f"token of {name}", ttl)


def opened(cleanup: ExitStack, url: str) -> RedisStore:
    store = store_at(url)
    cleanup.callback(store.close)
    return store


def held(cleanup: ExitStack, store: Store, name: str = "held") -> Lease:
    """A lease that the heartbeat keeps until the test ends."""
    lease = Lease(store, claim_of(name))
    assert lease.acquire() is None
    cleanup.callback(lease.release)
    return lease


def seconds_to_a_grant(store: Store, name: str = "next") -> float:
    """How long acquire takes; more often than not a lock is asked for once."""
    began = clock()
    while not isinstance(granted(store, name), Grant):
        assert clock() - began < 20
    return clock() - began


def granted(store: Store, name: str) -> Any:
    return answered(lambda: store.acquire(claim_of(name)))


def answered(ask: Callable[[], Any]) -> Any:
    """What *ask* returns, or nothing if the store did not answer."""
    with suppress(StoreError):
        return ask()
    return None


def end_of(lease: Lease) -> float:
    """When it ends unless it is renewed; renewals are further apart than the tenth that is rounded away."""
    return round(clock() + lease.remaining(), 1)


def renewed_after(lease: Lease, what: str) -> None:
    first = end_of(lease)
    until(lambda: lease.lost or end_of(lease) > first, what)
    assert not lease.lost


def wait_until_replicated(deployment: Deployment) -> None:
    with deployment.master.client() as client:
        until(lambda: client.wait(2, 100) == 2, "both replicas have it")


def assert_that_the_next_grant_comes_soon(store: Store, deployment: Deployment) -> None:
    """Kill the master, and wait for a grant."""
    dead = deployment.master
    with ThreadPoolExecutor(1) as pool:
        dead.stop()
        elected = pool.submit(deployment.wait_for_another, dead)
        seconds = seconds_to_a_grant(store)

        # Once in a while the sentinels have to vote once more, and a busy machine is late for all of them.
        assert seconds < max(NEXT_GRANT, elected.result() + AT_ONCE)
    assert deployment.master is not dead


def stop_replication(deployment: Deployment) -> None:
    """Let no replica connect to the master any more."""
    for replica in deployment.servers[1:]:
        with replica.client() as client:
            client.config_set("masteruser", "nobody")
            client.config_set("masterauth", "wrong")
    with deployment.master.client() as client:
        client.client_kill_filter(_type="replica")
        until(lambda: client.info("replication")["connected_slaves"] == 0, "none is connected")


def connections(client: Any) -> int:
    """Of stores, which keep them open."""
    return sum(1 for one in client.client_list(_type="normal") if one["cmd"] in ("evalsha", "eval"))


# The figures of docs/topologies.md.


def test_after_the_master_has_died_the_next_grant_comes_soon_and_held_leases_are_kept(
    of_each_kind: Deployment, cleanup: ExitStack
) -> None:
    store = opened(cleanup, of_each_kind.url)
    lease = held(cleanup, store)
    wait_until_replicated(of_each_kind)

    assert_that_the_next_grant_comes_soon(store, of_each_kind)
    renewed_after(lease, "it is renewed at the new master")

    with of_each_kind.master.client() as client:
        assert client.exists(lease.key)


def test_a_master_that_hangs_is_as_good_as_dead(shaken: Deployment, cleanup: ExitStack) -> None:
    store = opened(cleanup, shaken.url)
    lease = held(cleanup, store)
    wait_until_replicated(shaken)
    hanging = shaken.master
    with ThreadPoolExecutor(1) as pool:
        os.kill(hanging.pid, signal.SIGSTOP)
        elected = pool.submit(shaken.wait_for_another, hanging)
        seconds = seconds_to_a_grant(store)

        # Of the time, one second is what a connection waits for a reply. Once in a while the sentinels vote once more.
        assert seconds < max(NEXT_GRANT + 1, elected.result() + AT_ONCE)
    renewed_after(lease, "it is renewed at the new master")


def test_a_master_dies_while_one_sentinel_is_silent(shaken: Deployment, cleanup: ExitStack) -> None:
    proxy = cleanup.enter_context(Proxy(shaken.sentinels[0].port))
    others = ";".join(shaken.hosts[1:])
    store = opened(cleanup, f"sentinel://127.0.0.1:{proxy.port};{others}/0?master_name={NAME}")
    lease = held(cleanup, store)
    wait_until_replicated(shaken)
    proxy.black_hole()

    assert_that_the_next_grant_comes_soon(store, shaken)
    renewed_after(lease, "it is renewed at the new master")


def test_a_failover_by_hand_costs_next_to_nothing(of_each_kind: Deployment, cleanup: ExitStack) -> None:
    store = opened(cleanup, of_each_kind.url)
    lease = held(cleanup, store)
    wait_until_replicated(of_each_kind)
    before = of_each_kind.master
    of_each_kind.fail_over()

    assert seconds_to_a_grant(store) < AT_ONCE
    with before.client() as client:
        until(lambda: connections(client) == 0, "nobody is connected to the old master")
    renewed_after(lease, "it is renewed at the new master")
    with of_each_kind.master.client() as client:
        assert client.exists(lease.key)


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

    began = clock()
    with pytest.raises(StoreError) as unanswered:
        store.renew([claim_of("silent")], 1.0)
    assert clock() - began < SILENT_RENEWAL

    began = clock()
    with pytest.raises(StoreError):
        store.acquire(claim_of("silent"))
    assert clock() - began < ACQUIRE_BOUND + 1.5
    for proxy in proxies:
        assert f"127.0.0.1:{proxy.port}: " in str(unanswered.value)
    assert f"no sentinel knows a master {NAME}" in str(unanswered.value)


def test_one_sentinel_that_answers_is_enough(calm: Deployment, cleanup: ExitStack) -> None:
    url, proxies = silenced(cleanup, calm, 2)
    for proxy in proxies:
        proxy.black_hole()

    store = opened(cleanup, url)
    # Half a second for each that is silent, and for the next connections none.
    assert seconds_to_a_grant(store, "one of three") < AT_ONCE
    store.close()

    assert seconds_to_a_grant(store, "again") < 0.4


def test_sentinels_that_are_silent_harm_nobody_who_has_heard_of_the_master(
    calm: Deployment, cleanup: ExitStack
) -> None:
    url, proxies = silenced(cleanup, calm, 3)
    store = opened(cleanup, url)
    # What renews it has no connection yet.
    lease = held(cleanup, store, "heard")
    for proxy in proxies:
        proxy.black_hole()

    assert seconds_to_a_grant(store, "heard as well") < AT_ONCE
    renewed_after(lease, "it is renewed without a sentinel")


# A master that another one has replaced, and that does not know it yet.


def test_who_was_idle_in_a_failover_leaves_the_old_master_soon(shaken: Deployment, cleanup: ExitStack) -> None:
    idle, other = opened(cleanup, shaken.url), opened(cleanup, shaken.url)
    assert isinstance(idle.acquire(claim_of("before")), Grant)
    wait_until_replicated(shaken)
    before = shaken.master
    shaken.fail_over()
    assert isinstance(other.acquire(claim_of("elsewhere")), Grant)
    with before.client() as client:
        # Nobody has told it yet.
        assert client.role()[0] == b"master" or client.role()[0] == "master"

    # The first call of the idle one may still go there.
    granted(idle, "elsewhere")

    with before.client() as client:
        until(lambda: connections(client) == 0, "it has left the old master", timeout=AT_ONCE)
    mine = claim_of("elsewhere")
    assert isinstance(idle.acquire(Claim(mine.key, "another token", TTL)), Conflict)


def test_a_lease_that_the_old_master_has_granted_is_told_as_lost_at_once(
    shaken: Deployment, cleanup: ExitStack
) -> None:
    store = opened(cleanup, shaken.url)
    assert isinstance(store.acquire(claim_of("before")), Grant)
    before = shaken.master
    shaken.fail_over()
    # On a busy machine the sentinels may answer before the old master does.
    store._servers._look_at = float("inf")  # type: ignore[attr-defined]
    lease = Lease(store, claim_of("at the old master", ttl=60.0))
    assert lease.acquire() is None
    with before.client() as client:
        assert client.exists(lease.key)

    store._servers._look_at = float("-inf")  # type: ignore[attr-defined]
    answered(lambda: store.holders("singleton:v3:{another:00}"))

    until(lambda: lease.lost, "it is told long before it would be renewed", timeout=15)
    assert lease.lost_reason == "expired"


def test_who_waits_at_the_old_master_hears_the_release_at_the_new_one(shaken: Deployment, cleanup: ExitStack) -> None:
    store, elsewhere = opened(cleanup, shaken.url), opened(cleanup, shaken.url)
    mine = claim_of("wanted", ttl=60.0)
    assert isinstance(store.acquire(mine), Grant)
    with store.waiter(Claim(mine.key, "waiter", 60.0)) as waiter:
        seconds = waiter.ask()
        assert isinstance(seconds, float)
        wait_until_replicated(shaken)
        shaken.fail_over()
        slept: list[float] = []

        def sleep() -> None:
            began = clock()
            waiter.sleep(float(seconds))
            slept.append(clock() - began)

        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        # Somebody else in the process finds out.
        store.acquire(claim_of("other"))
        sleeper.join(20)

        assert slept[0] < 5
        assert isinstance(waiter.ask(), float)
        assert isinstance(elsewhere.acquire(claim_of("another")), Grant)
        began = clock()
        elsewhere.release(mine, 1)
        waiter.sleep(float(seconds))
        assert isinstance(waiter.ask(), Grant)
        assert clock() - began < AT_ONCE


def test_a_failover_is_one_line_in_the_log(
    shaken: Deployment, cleanup: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(cleanup, shaken.url)
    store.acquire(claim_of("before"))
    before = shaken.master
    shaken.fail_over()
    assert seconds_to_a_grant(store) < AT_ONCE

    until(lambda: "lock.moved" in caplog.text, "it is told")
    assert seconds_to_a_grant(store, "more") < AT_ONCE
    (line,) = [record.getMessage() for record in caplog.records if "lock.moved" in record.getMessage()]
    assert f"master=127.0.0.1:{shaken.master.port} before=127.0.0.1:{before.port}" in line


def test_a_lease_that_was_not_replicated_is_told_as_lost(shaken: Deployment, cleanup: ExitStack) -> None:
    store = opened(cleanup, shaken.url)
    assert isinstance(store.acquire(claim_of("before")), Grant)
    stop_replication(shaken)
    told_at: list[float] = []
    lease = Lease(store, claim_of("too late"), on_lost=lambda _: told_at.append(clock()))
    assert lease.acquire() is None
    shaken.master.stop()

    other = Claim(lease.key, "another token", TTL)
    until(lambda: answered(lambda: isinstance(store.acquire(other), Grant)), "another is granted the lock")
    granted_at = clock()

    until(lambda: told_at, "its holder is told")
    assert lease.lost_reason in ("expired", "taken")
    assert told_at[0] - granted_at < TTL / 3 + AT_ONCE


# A master that is cut off from replicas and sentinels, but not from a holder.


def test_a_master_that_is_cut_off_refuses_if_the_operator_has_said_so(cleanup: ExitStack) -> None:
    careful = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
    deployment = cleanup.enter_context(deployed("redis", *careful, behind=Proxy))
    assert deployment.front is not None
    # As one that reaches the old master, and no sentinel.
    on_its_side, elsewhere = opened(cleanup, deployment.servers[0].url), opened(cleanup, deployment.url)
    told_at: list[float] = []
    lease = Lease(on_its_side, claim_of("cut off"), on_lost=lambda _: told_at.append(clock()))
    assert lease.acquire() is None
    renewed_after(lease, "it is renewed before")
    deployment.front.black_hole()

    other = Claim(lease.key, "another token", TTL)
    until(lambda: answered(lambda: isinstance(elsewhere.acquire(other), Grant)), "the other side grants")
    granted_at = clock()

    until(lambda: told_at, "the holder on its side is told")
    assert lease.lost_reason == "unreachable"
    assert told_at[0] - granted_at < OVERLAP


# Processes.


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_that_finds_another_master_leaves_its_parents_connections_alone(
    shaken: Deployment, cleanup: ExitStack
) -> None:
    store = opened(cleanup, shaken.url)
    assert isinstance(store.acquire(claim_of("parent")), Grant)
    assert store.renew([claim_of("parent")], 1.0) == [Answer.DONE]
    shaken.fail_over()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            answer = store.acquire(claim_of("child"))
            os.write(write, type(answer).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answered:
        assert answered.read() == "Grant"
    os.waitpid(pid, 0)

    # Had the child closed its connections, or read from them, it would hear of that now.
    assert isinstance(store.acquire(claim_of("parent again")), Grant)
    assert store.renew([claim_of("parent again")], 1.0) == [Answer.DONE]
