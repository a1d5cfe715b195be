"""Leases at a store whose master goes: who gets one when, and who keeps one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from celery_singleton_lock import Lease, StoreError
from celery_singleton_lock.errors import LostReason
from celery_singleton_lock.leases.holding import Holding
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Claim, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.servers import Server
from tests.waiting import Watch, until

TTL = 6.0
KEPT = 20.0
"""The ttl of a lease that outlasts a failover: on a busy machine they may vote twice, or fail over twice."""
NEXT_GRANT = 3.5
"""Seconds from the death of a master to the next grant, if it is taken for dead after one."""
AT_ONCE = 4.0
ENOUGH = 60
"""Names, so that each server of a cluster has some."""

Topology = Any


def claim_of(name: object, ttl: float = TTL, token: str = "mine") -> Claim:
    return Claim(f"singleton:v3:{{{name}:00}}", token, ttl)


def opened(cleanup: ExitStack, url: str, replicas: int = 0) -> Store:
    store = store_from_url(url, replicas=replicas)
    cleanup.callback(store.close)
    return store


def held(cleanup: ExitStack, store: Store, name: object = "held", ttl: float = KEPT) -> Lease:
    """A lease that the heartbeat keeps until the test ends."""
    lease = leased(store, claim_of(name, ttl, "held"))
    cleanup.callback(lease.release)
    return lease


def leased(store: Store, claim: Claim, on_lost: Callable[[Holding, LostReason], None] | None = None) -> Lease:
    """A lease that the heartbeat keeps for as long as the test has it."""
    holding = Holding(store, claim, on_lost=on_lost)
    assert isinstance(holding.acquire(), Grant)
    return holding.view


def seconds_to_a_grant(store: Store, name: object) -> float:
    """How long acquire takes; more often than not a lock is asked for once."""
    with Watch() as watch:
        while not isinstance(granted(store, name), Grant):
            assert watch.seconds < 60
    return watch.seconds


def names_at(topology: Topology, server: Server, number: int) -> list[int]:
    return [name for name in range(ENOUGH) if topology.owner(claim_of(name).key) is server][:number]


def assert_that_the_next_grant_comes_soon(
    store: Store, topology: Topology, dead: Server, end: Callable[[], object], name: object, slack: float = 0.0
) -> None:
    with ThreadPoolExecutor(1) as pool:
        end()
        elected = pool.submit(topology.wait_for_another, dead)
        seconds = seconds_to_a_grant(store, name)

        # Once in a while they have to vote once more, and a busy machine is late for all of them.
        assert seconds < max(NEXT_GRANT, elected.result() + AT_ONCE) + slack


def granted(store: Store, name: object) -> Any:
    return answered(lambda: store.acquire(claim_of(name)))


def answered(ask: Callable[[], Any]) -> Any:
    with suppress(StoreError):
        return ask()
    return None


def final_result(lease: Lease) -> float:
    """When it ends unless it is renewed; renewals are further apart than the tenth that is rounded away."""
    return round(clock() + lease.remaining(), 1)


def renewed_after(lease: Lease, what: str) -> None:
    first = final_result(lease)
    until(lambda: lease.lost or final_result(lease) > first, what)
    assert not lease.lost


def connections(client: Any) -> int:
    """Of stores, which keep them open."""
    return sum(1 for one in client.client_list(_type="normal") if one["cmd"] in ("evalsha", "eval"))
