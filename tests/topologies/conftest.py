"""A deployment with Sentinel that nobody harms, and those that tests break."""

from collections.abc import Iterator

import pytest

from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.redis import master
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.sentinels import Deployment, deployed
from tests.servers import SERVERS


@pytest.fixture(scope="session")
def calm() -> Iterator[Deployment]:
    """For tests that do no harm to it."""
    with deployed("redis") as deployment:
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


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process tells once, it tells in each test."""
    monkeypatch.setattr(master, "_told", {})


def store_at(url: str) -> RedisStore:
    store = store_from_url(url)
    assert isinstance(store, RedisStore)
    return store
