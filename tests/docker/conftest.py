"""Two workers and their Redis in containers, by pytest-celery, and a second Redis that keeps the record."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import pytest
import redis
from celery import Celery
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryWorkerCluster,
    RedisTestBackend,
    RedisTestBroker,
)
from pytest_docker_tools import network
from pytest_docker_tools.wrappers import Container

from tests.docker import containers
from tests.docker.containers import StoreContainer, WorkerContainer, WorkerNode
from tests.docker.tasks import SETTINGS
from tests.recorder import Event, Recorder
from tests.servers import missing
from tests.waiting import until


@dataclass(frozen=True)
class Site:
    """Two workers, the store of their locks, and the record of what their bodies did."""

    workers: Sequence[Any]
    store: Any
    recorder: Recorder

    def begun(self) -> Event:
        """The first body, once it runs."""
        return until(lambda: self.recorder.events("enter"), "a body has begun")[0]

    def worker_of(self, event: Event) -> Any:
        return next(worker for worker in self.workers if worker.runs(event))

    def lock_keys(self) -> list[str]:
        # The counts of all tasks are no lock.
        return [key for key in self.store.container.client.scan_iter("singleton:*") if "{" in key]

    def keys_without_expiry(self) -> list[str]:
        client = self.store.container.client
        return [key for key in client.scan_iter("singleton:*") if client.ttl(key) == -1]


@pytest.fixture(autouse=True)
def no_shared_tasks() -> None:
    """Here they are those of the tests: the apps that pytest-celery makes get them so."""


class Publisher(CeleryTestSetup):
    """The app on this side of the broker."""

    @classmethod
    def update_app_config(cls, app: Celery) -> None:
        app.conf.update(SETTINGS)


@pytest.fixture(scope="session")
def docker_client() -> Iterator["docker.DockerClient"]:
    """The engine; without one the test is skipped, or fails in CI."""
    try:
        client = docker.from_env()
    except docker.errors.DockerException as error:
        missing(f"no Docker engine answers: {error}")
    yield client
    client.close()


default_pytest_celery_network = network(scope="session")
store_container = containers.store()
witness_container = containers.store()
celery_base_worker_image = containers.worker_image()
first_worker_container = containers.worker("celery_base_worker_image")
second_worker_container = containers.worker("celery_base_worker_image")


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    return Publisher


@pytest.fixture
def celery_backend_cluster(store_container: StoreContainer) -> Iterator[CeleryBackendCluster]:
    node = RedisTestBackend(store_container)
    yield CeleryBackendCluster(node)
    node.teardown()


@pytest.fixture
def celery_broker_cluster(store_container: StoreContainer) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(RedisTestBroker(store_container))


@pytest.fixture
def emptied(
    celery_setup_app: Celery, celery_backend_cluster: CeleryBackendCluster, witness_container: StoreContainer
) -> Recorder:
    """Leave nothing of an earlier test behind."""
    celery_backend_cluster[0].container.client.flushall()
    celery_setup_app.control.purge()
    with redis.Redis.from_url(witness_container.host_url) as witness:
        witness.flushall()
    return Recorder(witness_container.host_url)


@pytest.fixture
def default_worker_env(
    default_worker_env: dict[str, str], emptied: Recorder, witness_container: StoreContainer
) -> dict[str, str]:
    return {**default_worker_env, "PYTHONPATH": "/src", "TEST_RECORD": witness_container.url}


@pytest.fixture
def celery_worker_cluster(
    celery_setup_app: Celery, first_worker_container: Container, second_worker_container: Container
) -> CeleryWorkerCluster:
    pair = [WorkerContainer.of(begun) for begun in (first_worker_container, second_worker_container)]
    cluster = CeleryWorkerCluster(*(WorkerNode(container=worker, app=celery_setup_app) for worker in pair))
    until(cluster.ready, "both workers are ready", timeout=60)
    return cluster


@pytest.fixture
def site(celery_setup: CeleryTestSetup, emptied: Recorder) -> Iterator[Site]:
    """A site with nothing on it but two idle workers."""
    site = Site(list(celery_setup.worker_cluster), celery_setup.backend, emptied)
    yield site
    celery_setup.app.close()
    site.recorder.close()
    # Results that are collected only when the server is gone complain.
    gc.collect()
