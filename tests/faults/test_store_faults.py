"""A held lock while server or network misbehave: nothing blocks, nothing is stranded, a loss is told in time."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_singleton_lock import Lease, Lock, StoreError, signals
from celery_singleton_lock.stores.clock import clock
from tests.proxy import Proxy
from tests.servers import SERVERS, FakeClock, Server, running
from tests.topologies.leases import final_result
from tests.waiting import Watch, until

TTL = 2.0
SLACK = 3.0


@pytest.fixture
def reasons() -> Iterator[list[str]]:
    told: list[str] = []

    def is_told(reason: str, **_: Any) -> None:
        told.append(reason)

    signals.lock_lost.connect(is_told)
    yield told
    signals.lock_lost.disconnect(is_told)


@pytest.fixture
def proxy(own: Server) -> Iterator[Proxy]:
    with Proxy(own.port) as proxy:
        yield proxy


@contextmanager
def held(url: str, ttl: float = TTL) -> Iterator[tuple[Lock, Lease]]:
    """A lock that has been renewed at least once, so that the heartbeat has its connection."""
    lock = Lock("stock", url=url, ttl=ttl)
    lease = lock.acquire()
    first = final_result(lease)
    until(lambda: final_result(lease) > first, "it has been renewed")
    yield lock, lease
    if lease.held:
        lock.release()


def is_renewed(lease: Lease) -> None:
    """The full ttl lies ahead again, counted from now on."""
    full = clock() + lease.ttl * 0.9
    until(lambda: lease.lost or final_result(lease) > full, "it is renewed")
    lease.check()


def is_told_in_time(lease: Lease) -> None:
    until(lambda: lease.lost or not lease.remaining(), "its time is over")
    until(lambda: lease.lost, "its end is told", timeout=10)


def is_free_within_ttl(server: Server) -> int:
    lock = Lock("stock", url=server.url, ttl=TTL)
    lease = lock.acquire(timeout=20)
    lock.release()
    return lease.fence


def within(seconds: float, call: Callable[[], Any]) -> Any:
    try:
        with Watch() as watch:
            return call()
    finally:
        assert watch.seconds < seconds + SLACK


def test_a_store_that_is_silent_is_not_taken_for_a_process_that_got_no_time(
    own: Server, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    with held(proxy.url, ttl=4) as (lock, lease):
        proxy.black_hole()
        # The renewal was sent long ago, and waits for its answer.
        until(lambda: lease.remaining() < 0.35 * lease.ttl, "its deadline is near")
        lock.release()

        until(lambda: "lock.release_failed" in caplog.text, "the store is silent")
    assert "lock.late" not in caplog.text
    # A renewal would have failed, but the lease had been released.
    assert "lock.renewal_failed" not in caplog.text


def test_a_release_that_got_no_answer_is_repeated_in_the_background(own: Server, proxy: Proxy) -> None:
    with held(proxy.url, ttl=30) as (lock, _):
        proxy.black_hole()
        lock.release()
        proxy.forward()

        until(lambda: Lock("stock", url=own.url).acquire(blocking=False), "the lock is free")


def test_a_restart_with_its_data_costs_nothing() -> None:
    persistent = ("--appendonly", "yes", "--appendfsync", "always")
    with running("redis", *persistent) as server, held(server.url, ttl=4) as (_, lease):
        server.stop()
        server.start()

        is_renewed(lease)
        assert Lock("stock", url=server.url).acquire(blocking=False) is None


def test_a_demoted_master_is_waited_for_until_the_deadline(own: Server, reasons: list[str]) -> None:
    with held(own.url) as (_, lease), own.client() as client:
        client.replicaof("127.0.0.1", 1)

        is_told_in_time(lease)
        until(lambda: "unreachable" in reasons, "the signal tells why")
        with pytest.raises(StoreError, match="ReadOnly"):
            within(5.0, Lock("other", url=own.url).acquire)
        client.replicaof("NO", "ONE")
        assert is_free_within_ttl(own) > lease.fence


def test_after_a_failover_that_lost_the_lock_the_fence_still_grows(own: Server) -> None:
    with Proxy(own.port) as link, running(own.kind) as replica, replica.client() as client:
        client.replicaof("127.0.0.1", link.port)
        until(lambda: client.info("replication")["master_link_status"] == "up", "it replicates")
        fences = [is_free_within_ttl(own) for _ in range(3)]
        until(lambda: client.info("replication")["master_repl_offset"], "it has followed")
        link.black_hole()
        with held(own.url) as (_, lease):
            client.replicaof("NO", "ONE")

            fences += [lease.fence, is_free_within_ttl(replica)]

    assert fences == sorted(set(fences))


def test_a_server_clock_that_is_set_forward_is_told_as_a_loss_and_the_fence_grows(wall_clock: FakeClock) -> None:
    with running("valkey", env=wall_clock.env) as server, held(server.url) as (_, lease):
        wall_clock.step("+60")

        until(lambda: lease.lost, "the loss is told")
        assert is_free_within_ttl(server) > lease.fence


def test_a_server_clock_that_is_set_back_keeps_the_holder(wall_clock: FakeClock) -> None:
    with running("valkey", env=wall_clock.env) as server, held(server.url) as (lock, lease):
        wall_clock.step("-3600")
        is_renewed(lease)
        assert Lock("stock", url=server.url, ttl=TTL).acquire(blocking=False) is None
        lock.release()

        is_free_within_ttl(server)


STEPPED_CLIENT = """
import sys, time
from celery_singleton_lock import Lock
with Lock("stock", url=sys.argv[1], ttl=3) as lease:
    print(time.time(), flush=True)
    sys.stdin.readline()
    lease.check()
    print(time.time(), Lock("stock", url=sys.argv[1]).acquire(blocking=False), flush=True)
"""


@pytest.mark.parametrize("step", ["+3600", "-3600"])
@pytest.mark.parametrize("kind", ["memory", *SERVERS])
def test_a_client_whose_clock_is_set_keeps_its_lease(
    request: pytest.FixtureRequest, wall_clock: FakeClock, kind: str, step: str
) -> None:
    url = "memory://" if kind == "memory" else request.getfixturevalue(f"{kind}_process").url
    client = subprocess.Popen(
        [sys.executable, "-c", STEPPED_CLIENT, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **wall_clock.env},
    )
    before = float(client.stdout.readline())
    wall_clock.step(step)
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 4, "more than the ttl has passed")

    output, _ = client.communicate("\n", timeout=20)

    after, given_to_another = output.split()
    assert client.returncode == 0
    assert abs(float(after) - before - int(step)) < 60
    assert given_to_another == "None"
