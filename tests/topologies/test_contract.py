"""What every store of locks owes its callers: with Sentinel, with a replica that has each grant, in a cluster."""

from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import MovedError

from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.redis.store import Store
from tests.clusters import Cluster
from tests.contract.asking import KEY
from tests.contract.test_stores import TestStore as OfOneServer
from tests.replicas import replicated
from tests.sentinels import Deployment
from tests.servers import Server


@pytest.fixture(scope="module")
def replicated_master() -> Iterator[Server]:
    with replicated("valkey", 1) as (master, _):
        yield master


class TestSentinelStore(OfOneServer):
    @pytest.fixture
    def server(self, calm: Deployment) -> Server:
        calm.servers[0].flush()
        return calm.servers[0]

    @pytest.fixture
    def store(self, server: Server, calm: Deployment) -> Iterator[Store]:
        store = Store(calm.url, {})
        yield store
        store.close()


class TestReplicatedStore(OfOneServer):
    @pytest.fixture
    def server(self, replicated_master: Server) -> Server:
        replicated_master.flush()
        return replicated_master

    @pytest.fixture
    def store(self, server: Server) -> Iterator[Store]:
        store = Store(server.url, {}, 1)
        yield store
        store.close()


class AtOneServer:
    """A client of the server that has the key, which calls the channels of a cluster what others call theirs."""

    def __init__(self, client: Any, cluster: Cluster) -> None:
        self._client, self._cluster = client, cluster

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, **options: Any) -> Any:
            try:
                return getattr(self._client, name)(*arguments, **options)
            except MovedError:
                # About another key than that of most tests.
                with self._cluster.owner(arguments[0]).client() as client:
                    return getattr(client, name)(*arguments, **options)

        return ask

    def pubsub_channels(self, pattern: str) -> Any:
        return self._client.execute_command("PUBSUB SHARDCHANNELS", pattern)

    def keys(self) -> list[str]:
        found = list[str]()
        for master in self._cluster.masters:
            with master.client() as client:
                found += client.keys()
        return found


class TestClusterStore(OfOneServer):
    @pytest.fixture
    def server(self, calm_cluster: Cluster) -> Server:
        calm_cluster.flush()
        return calm_cluster.owner(KEY)

    @pytest.fixture
    def client(self, server: Server, calm_cluster: Cluster) -> Iterator[Any]:
        with server.client() as client:
            yield AtOneServer(client, calm_cluster)

    @pytest.fixture
    def store(self, server: Server, calm_cluster: Cluster) -> Iterator[Store]:
        store = store_from_url(calm_cluster.url)
        yield store
        store.close()
