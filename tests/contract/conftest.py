"""A store on each server, what that server knows, and a network before it."""

from collections.abc import Iterator
from typing import Any

import pytest

from celery_singleton_lock.stores.redis.store import Store
from tests.proxy import Proxy
from tests.servers import Server


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    store = Store(server.url, {})
    yield store
    store.close()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with server.client() as client:
        yield client


@pytest.fixture
def proxy(valkey: Server) -> Iterator[Proxy]:
    with Proxy(valkey.port) as proxy:
        yield proxy
