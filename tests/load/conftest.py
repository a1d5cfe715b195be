"""A server that notes how long each command has taken."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import Server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with server.client() as client:
        client.config_set("slowlog-log-slower-than", 0)
        # Commands of scripts are noted, too.
        client.config_set("slowlog-max-len", 1_000_000)
        client.slowlog_reset()
        yield client
        client.slowlog_reset()
        client.config_set("slowlog-log-slower-than", 10_000)
