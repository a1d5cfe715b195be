import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import pytest

from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.redis.store import Store
from tests.clusters import Cluster, clustered
from tests.sentinels import Deployment, deployed
from tests.servers import SERVERS
from tests.topologies.leases import Topology


@pytest.fixture(scope="session")
def calm() -> Iterator[Deployment]:
    """For tests that do no harm to it. A pause of the machine starts no failover."""
    with deployed("redis", down_after=60.0) as deployment:
        yield deployment


@pytest.fixture
def shaken() -> Iterator[Deployment]:
    with deployed("redis") as deployment:
        yield deployment


@pytest.fixture(scope="session")
def calm_cluster() -> Iterator[Cluster]:
    with clustered("redis") as cluster:
        yield cluster


@pytest.fixture
def shaken_cluster() -> Iterator[Cluster]:
    with clustered("redis") as cluster:
        yield cluster


@pytest.fixture(params=[deployed, clustered], ids=["sentinel", "cluster"])
def of_each_topology(request: pytest.FixtureRequest) -> Iterator[Topology]:
    with request.param("redis") as topology:
        yield topology


@pytest.fixture(params=[deployed, clustered], ids=["sentinel", "cluster"])
def of_each_kind(request: pytest.FixtureRequest, kind: str) -> Iterator[Topology]:
    with request.param(kind) as topology:
        yield topology


@pytest.fixture(params=SERVERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(calm_cluster: Cluster) -> Cluster:
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
def tasks(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the app, in the same environment as the workers."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sys.modules.pop("tests.topologies.app", None)
    module = import_module("tests.topologies.app")
    yield module
    module.app.close()
    gc.collect()
