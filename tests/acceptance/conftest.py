"""A record, and the environment that a test's workers and publishers share."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.recorder import Recorder
from tests.servers import Server

APP = "tests.acceptance.app"


@pytest.fixture
def env(valkey: Server) -> dict[str, str]:
    return {"TEST_STORE": valkey.url, "TEST_TTL": "3"}


@pytest.fixture
def recorder(valkey: Server) -> Iterator[Recorder]:
    recorder = Recorder(valkey.url.removesuffix("/0") + "/3")
    yield recorder
    recorder.close()


@pytest.fixture
def tasks(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tasks as a publisher sees them."""
    from tests.acceptance import app as module

    store = valkey.url.removesuffix("/0")
    module.app.conf.update(broker_url=valkey.url, result_backend=f"{store}/1", singleton_lock_url=f"{store}/2")
    yield module
    module.app.close()
