import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from kombu import pools

from celery_singleton_lock import LockHeld
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.operations.cli import singleton
from celery_singleton_lock.stores.redis.store import Store
from tests.acceptance import app
from tests.rabbit import rabbitmq
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

APP = "tests.acceptance.app"

Operate = Callable[..., Result]


@pytest.fixture(scope="module", autouse=True)
def env(valkey_process: Server) -> Iterator[dict[str, str]]:
    """The environment of each process of these tests. With `C_FORCE_ROOT`, Celery runs as root, too."""
    shared = {"TEST_STORE": valkey_process.url, "TEST_TTL": "10", "C_FORCE_ROOT": "1"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in shared.items():
            patched.setenv(name, value)
        yield shared


@pytest.fixture(autouse=True)
def tasks(valkey: Server) -> Iterator[Any]:
    # Another module of tests may have changed this app, or closed its pools.
    forget_connections(app.app)
    store = valkey.url.removesuffix("/0")
    app.app.conf.update(broker_url=valkey.url, result_backend=f"{store}/1", singleton_lock_url=f"{store}/2")
    yield app
    has_published = app.app.amqp._producer_pool is not None
    forget_connections(app.app)
    if has_published:
        # Results that are collected after the server has gone would write errors.
        gc.collect()


@pytest.fixture
def store(tasks: Any) -> Store:
    return store_of(tasks.app)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def operate(tasks: Any) -> Operate:
    return operated(tasks.app)


def invoked(app: Celery, *arguments: str) -> Result:
    return CliRunner().invoke(singleton, arguments, obj=CLIContext(app, no_color=True, workdir=None))


def operated(app: Celery) -> Operate:
    def run(*arguments: str, code: int = 0) -> Result:
        done = invoked(app, *arguments)
        assert done.exit_code == code, (done.output, done.stderr, done.exception)
        return done

    return run


@pytest.fixture(scope="session")
def rabbit() -> Iterator[str]:
    with rabbitmq() as server:
        yield server.url


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.prove)])
def broker(request: pytest.FixtureRequest, tasks: Any, valkey: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    url = valkey.url if request.param == "redis" else str(request.getfixturevalue("rabbit"))
    tasks.app.conf.broker_url = url
    monkeypatch.setenv("TEST_BROKER", url)
    # RabbitMQ still has the messages of earlier tests, while Redis was flushed.
    tasks.app.control.purge()
    return url


def forget_connections(app: Any) -> None:
    """Forget the publisher's connections. RabbitMQ closes an idle one, and a message published on it is lost."""
    app.close()
    app.amqp._producer_pool = None
    pools.reset()


def new_call(task: Any, *args: Any, but: list[Any]) -> Any:
    """Publish until the call is not refused, and is none of the calls in *but*."""
    known = {each.id for each in but}

    def published() -> Any:
        with suppress(LockHeld):
            result = task.delay(*args)
            return result if result.id not in known else None
        return None

    return until(published, "a new call is published", timeout=60)


def one_valkey() -> Any:
    """A fixture `valkey` that is flushed once for a module, whose tests have keys of their own."""

    @pytest.fixture(scope="module")
    def valkey(valkey_process: Server) -> Server:
        valkey_process.flush()
        return valkey_process

    return valkey


def one_worker(concurrency: int, *, autouse: bool = False, **env: str) -> tuple[Any, Any]:

    @pytest.fixture(scope="module", autouse=autouse)
    def worker(valkey: Server) -> Iterator[Worker]:
        with workers("tests.acceptance.combined_app", env, concurrency=concurrency) as (worker,):
            yield worker

    return one_valkey(), worker
