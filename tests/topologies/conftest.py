"""Deployments with Sentinel, and clusters: one that nobody harms, and those that tests break."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.redis.store import Store
from tests.clusters import Cluster, clustered
from tests.sentinels import Deployment, deployed
from tests.servers import SERVERS


@pytest.fixture(scope="session")
def calm() -> Iterator[Deployment]:
    """For tests that do no harm to it, nor does a machine that is paused for a while."""
    with deployed("redis", down_after=60.0) as deployment:
        yield deployment


@pytest.fixture
def shaken() -> Iterator[Deployment]:
    """For one test, which may break it."""
    with deployed("redis") as deployment:
        yield deployment


@pytest.fixture(params=SERVERS)
def of_each_kind(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """The same, in turn with each kind of server."""
    with deployed(request.param) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def calm_cluster() -> Iterator[Cluster]:
    """For tests that do no harm to it."""
    with clustered("redis") as cluster:
        yield cluster


@pytest.fixture
def shaken_cluster() -> Iterator[Cluster]:
    """For one test, which may break it."""
    with clustered("redis") as cluster:
        yield cluster


@pytest.fixture(params=SERVERS)
def cluster_of_each_kind(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The same, in turn with each kind of server."""
    with clustered(request.param) as cluster:
        yield cluster


def store_at(url: str) -> Store:
    store = store_from_url(url)
    assert isinstance(store, Store)
    return store


@pytest.fixture
def cluster(calm_cluster: Cluster) -> Cluster:
    """Its slots move, and nobody is harmed."""
    calm_cluster.flush()
    return calm_cluster


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    store = store_from_url(cluster.url)
    yield store
    store.close()


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as cleanup:
        yield cleanup


@pytest.fixture
def tasks(environment: dict[str, str]) -> Iterator[Any]:
    from tests.topologies import cluster_app as module

    broker, url = environment["TEST_BROKER"], environment["TEST_CLUSTER"]
    module.app.conf.update(broker_url=broker, result_backend=broker, singleton_lock_url=url)
    yield module
    module.app.close()
    gc.collect()
