from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, uuid

from celery_singleton_lock import Lease
from celery_singleton_lock.stores import store_from_url
from tests.servers import SERVERS, Server
from tests.waiting import until


@pytest.fixture(params=(*SERVERS, "memory"))
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        store_from_url("memory://integration").call("FLUSHALL")
        return "memory://integration"
    server: Server = request.getfixturevalue(f"{request.param}_process")
    server.flush()
    return server.url


@pytest.fixture
def app(server: Server) -> Iterator[Celery]:
    app = Celery("integration", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_url=server.url, task_default_queue=uuid())
    yield app
    app.close()


def here(body: Callable[[], Any]) -> Any:
    return body()


def in_a_thread(body: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(body).result(120)


def is_renewed(lease: Lease) -> None:
    seen = [lease.remaining()]
    until(lambda: seen.append(lease.remaining()) or seen[-1] > seen[-2] or lease.lost, "it is renewed")
