"""Two workers and their servers, in containers or, with `--celery-nodes=process`, as processes of this machine."""

import gc
from collections.abc import Iterator
from typing import NamedTuple

import docker
import pytest
import redis
from celery import Celery
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryWorkerCluster,
    RabbitMQTestBroker,
    RedisTestBroker,
)
from pytest_docker_tools import network, volume
from pytest_docker_tools.wrappers import Container

from tests.docker import containers
from tests.docker.containers import APP, RabbitContainer, StoreContainer, StoreNode, WorkerContainer, WorkerNode
from tests.docker.processes import StoreProcess, WorkerProcess
from tests.docker.site import Site, Store
from tests.docker.tasks import SETTINGS
from tests.rabbit import rabbitmq
from tests.recorder import Recorder
from tests.servers import Server, missing, running
from tests.waiting import until
from tests.workers import workers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--celery-nodes", choices=["docker", "process"], default="docker", help="where tests/docker runs")


def pytest_report_header(config: pytest.Config) -> str:
    return f"celery nodes: {nodes(config)}"


def nodes(config: pytest.Config) -> str:
    # The option is unknown where this folder is met only on the way through all tests.
    return str(config.getoption("celery_nodes", "docker"))


class Kinds(NamedTuple):
    """What is broker, and what keeps the locks and results; one server does both where they are the same."""

    broker: str
    store: str


@pytest.fixture(autouse=True)
def no_shared_tasks() -> None:
    """Here they are those of the tests: the apps that pytest-celery makes get them so."""


@pytest.fixture(params=[Kinds("redis", "redis"), Kinds("rabbitmq", "valkey")], ids="-".join)
def kinds(request: pytest.FixtureRequest) -> Kinds:
    return request.param


@pytest.fixture
def site(request: pytest.FixtureRequest, kinds: Kinds) -> Iterator[Site]:
    """A site with nothing on it but two idle workers."""
    site: Site = request.getfixturevalue(f"site_by_{nodes(request.config)}")
    yield site
    site.recorder.close()
    # Results that are collected only when the server is gone complain.
    gc.collect()


class Publisher(CeleryTestSetup):
    """The app on this side of the broker."""

    @classmethod
    def update_app_config(cls, app: Celery) -> None:
        app.conf.update(SETTINGS)


def empty(publisher: Celery, store: Store, record: str) -> Recorder:
    """Leave nothing of an earlier test behind, neither in memory nor in what a restart would load."""
    with store.client() as client:
        client.flushall()
        client.save()
    publisher.control.purge()
    with redis.Redis.from_url(record) as client:
        client.flushall()
    return Recorder(record)


# As processes.


@pytest.fixture(scope="session")
def rabbitmq_process() -> Iterator[str]:
    with rabbitmq() as url:
        yield url


@pytest.fixture(scope="session")
def witness_process() -> Iterator[Server]:
    """Keeps the record, and is not restarted."""
    with running("valkey") as server:
        yield server


@pytest.fixture
def site_by_process(request: pytest.FixtureRequest, kinds: Kinds, witness_process: Server) -> Iterator[Site]:
    store: Server = request.getfixturevalue(f"{kinds.store}_process")
    broker = request.getfixturevalue("rabbitmq_process") if kinds.broker == "rabbitmq" else store.url
    publisher = Publisher.create_setup_app({"broker_url": broker, "result_backend": store.url}, "publisher")
    recorder = empty(publisher, StoreProcess(store), witness_process.url)
    env = {"CELERY_BROKER_URL": broker, "CELERY_RESULT_BACKEND": store.url, "TEST_RECORD": witness_process.url}
    with workers(APP, env, 2) as pair:
        yield Site([WorkerProcess(worker) for worker in pair], StoreProcess(store), recorder)
    publisher.close()


# As containers.


@pytest.fixture(scope="session")
def docker_client(pytestconfig: pytest.Config) -> Iterator["docker.DockerClient"]:
    """The engine; without one the test is skipped, or fails in CI."""
    if nodes(pytestconfig) == "process":
        pytest.skip("asked to do without a Docker engine")
    try:
        client = docker.from_env()
    except docker.errors.DockerException as error:
        missing(f"no Docker engine answers: {error}")
    yield client
    client.close()


default_pytest_celery_network = network(scope="session")
redis_data, valkey_data, witness_data = (volume(scope="session") for _ in range(3))
redis_container = containers.store("redis:7-alpine", "redis_data")
valkey_container = containers.store("valkey/valkey:9", "valkey_data")
witness_container = containers.store("redis:7-alpine", "witness_data")
rabbitmq_container = containers.server("rabbitmq:latest", "5672/tcp", RabbitContainer)
celery_base_worker_image = containers.worker_image()
first_worker_container = containers.worker("celery_base_worker_image")
second_worker_container = containers.worker("celery_base_worker_image")


@pytest.fixture
def celery_setup_cls() -> type[CeleryTestSetup]:
    return Publisher


@pytest.fixture
def celery_backend_cluster(request: pytest.FixtureRequest, kinds: Kinds) -> Iterator[CeleryBackendCluster]:
    node = StoreNode(request.getfixturevalue(f"{kinds.store}_container"))
    yield CeleryBackendCluster(node)
    node.teardown()


@pytest.fixture
def celery_broker_cluster(request: pytest.FixtureRequest, kinds: Kinds) -> CeleryBrokerCluster:
    node = RabbitMQTestBroker if kinds.broker == "rabbitmq" else RedisTestBroker
    return CeleryBrokerCluster(node(request.getfixturevalue(f"{kinds.broker}_container")))


@pytest.fixture
def emptied(
    celery_setup_app: Celery, celery_backend_cluster: CeleryBackendCluster, witness_container: StoreContainer
) -> Recorder:
    return empty(celery_setup_app, celery_backend_cluster[0], witness_container.host_url)


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
def site_by_docker(celery_setup: CeleryTestSetup, emptied: Recorder) -> Iterator[Site]:
    yield Site(list(celery_setup.worker_cluster), celery_setup.backend, emptied)
    celery_setup.app.close()
