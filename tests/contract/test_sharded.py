"""A store that is sharded behind one address, and used by a plain URL: keys of one script have to be in one slot."""

from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import RedisError

from celery_singleton_lock import Lock
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Renewal
from celery_singleton_lock.stores.redis import packed
from celery_singleton_lock.stores.redis.answers import advice_about
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.acceptance.conftest import APP, tasks
from tests.clusters import Node, sharded
from tests.contract import test_stores
from tests.contract.asking import KEY, OTHER, claim, granted
from tests.servers import SERVERS, Server
from tests.waiting import until
from tests.workers import workers

__all__ = ["tasks"]


@pytest.fixture(scope="module", params=SERVERS)
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with sharded(request.param) as node:
        yield node


@pytest.fixture
def server(node: Node) -> Node:
    node.flush()
    return node


def test_leases_in_several_slots_are_renewed_and_the_refusal_is_met_once(store: Store, client: Any) -> None:
    claims = [claim("a"), claim("b", key=OTHER), claim("c", key="singleton:v3:{third:00}", ttl=20.0)]
    for each in claims:
        granted(store.acquire(each))
    store.renew(claims[:1], 1.0)
    client.config_resetstat()

    for _ in range(3):
        assert store.renew(claims, 1.0) == [Renewal.RENEWED] * 3

    assert client.info("commandstats")["cmdstat_evalsha"]["rejected_calls"] == 1


def test_two_locks_of_one_process_outlast_their_ttl(server: Node, store: Store) -> None:
    with Lock("one", url=server.url, ttl=6) as one, Lock("two", url=server.url, ttl=6) as two:
        until(lambda: max(one.remaining(), two.remaining()) < 5, "time passes")
        until(lambda: one.lost or two.lost or min(one.remaining(), two.remaining()) > 4, "both are renewed")

        assert (one.lost, two.lost) == (False, False)
        assert [len(store.holders(lease.key)) for lease in (one, two)] == [1, 1]


def test_the_start_renews_two_leases_together_and_finds_that_it_works(store: Store, client: Any) -> None:
    Inventory(store).self_test("singleton:v3:{trial:00}", 5.0)

    assert store._renewals_per_script == 1
    assert client.keys() == []


def test_a_refusal_of_two_slots_is_told_with_the_setting(store: Store) -> None:
    with pytest.raises(RedisError) as refusal:
        store.servers.call(KEY, [packed("EXISTS", KEY, OTHER)], clock() + 5)

    assert "redis+cluster://" in (advice_about(refusal.value) or "")


@pytest.mark.prove
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_several_runs_of_one_worker_outlast_their_ttl(tasks: Any, valkey: Server, server: Node, pool: str) -> None:
    env = {"TEST_STORE": valkey.url, "TEST_LOCKS": server.url, "TEST_TTL": "4", "C_FORCE_ROOT": "1"}
    with workers(APP, env, 1, pool=pool, concurrency=4):
        results = [tasks.skipped.delay(f"k{number}", 6) for number in range(4)]

        assert [result.get(timeout=60) for result in results] == ["ran"] * 4


@pytest.mark.prove
class TestShardedStore(test_stores.TestStore):
    """All that a store owes its callers."""
