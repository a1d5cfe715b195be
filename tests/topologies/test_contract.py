"""What every store of locks owes its callers, of the one that Sentinel finds, and of one that waits for replicas."""

from collections.abc import Iterator

import pytest

from celery_singleton_lock.stores.redis.store import Store
from tests.contract.test_stores import TestStore as OfOneServer
from tests.replicas import replicated
from tests.sentinels import Deployment
from tests.servers import Server


@pytest.fixture(scope="module")
def replicated_master() -> Iterator[Server]:
    with replicated("valkey", 1) as (master, _):
        yield master


class TestSentinelStore(OfOneServer):
    """The contract, with a master that has replicas."""

    @pytest.fixture
    def server(self, calm: Deployment) -> Server:
        with calm.servers[0].client() as client:
            client.flushall()
        return calm.servers[0]

    @pytest.fixture
    def store(self, server: Server, calm: Deployment) -> Iterator[Store]:  # type: ignore[override]
        store = Store(calm.url, {})
        yield store
        store.close()


class TestReplicatedStore(OfOneServer):
    """The contract, of a store whose replica has to have each grant and each renewal."""

    @pytest.fixture
    def server(self, replicated_master: Server) -> Server:
        with replicated_master.client() as client:
            client.flushall()
        return replicated_master

    @pytest.fixture
    def store(self, server: Server) -> Iterator[Store]:  # type: ignore[override]
        store = Store(server.url, {}, 1)
        yield store
        store.close()
