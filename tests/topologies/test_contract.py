"""What every store of locks owes its callers, of the one that Sentinel finds."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.contract.test_stores import TestRedisStore as OfOneServer
from tests.sentinels import Deployment
from tests.servers import Server


class TestSentinelStore(OfOneServer):
    """The contract, with a master that has replicas."""

    @pytest.fixture
    def server(self, calm: Deployment) -> Server:
        with calm.servers[0].client() as client:
            client.flushall()
        return calm.servers[0]

    @pytest.fixture
    def store(self, server: Server, calm: Deployment) -> Iterator[Store]:  # type: ignore[override]
        store = RedisStore(calm.url, {})
        yield store
        store.close()

    @pytest.fixture
    def lose_all(self, client: Any) -> Callable[[], object]:
        return client.flushall  # type: ignore[no-any-return]
