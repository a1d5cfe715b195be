"""One key's crowd harms no other key: what a script costs and answers, however many hold, wait or come."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Answer, Claim, Facts, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.load.asking import asked
from tests.servers import Server

KEY = "singleton:v3:{shop.tasks.sync:00}"
CROWD = 150
# Milliseconds of the server that a script may take, by the median: many times what it takes on a quiet machine, and
# less than a walk over the whole crowd.
AT_MOST = 5.0


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    store = Store(server.url, {})
    yield store
    store.close()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with server.client() as client:
        client.config_set("slowlog-log-slower-than", 0)
        # The commands within the scripts are noted as well.
        client.config_set("slowlog-max-len", 1_000_000)
        client.slowlog_reset()
        yield client
        client.slowlog_reset()
        client.config_set("slowlog-log-slower-than", 10_000)


def claim(token: str, limit: int = 1, **more: Any) -> Claim:
    return Claim(KEY, token, 600.0, limit, Facts(f"id-of-{token}", hostname="celery@worker-1", pid=12345), **more)


def fill(client: Any, claims: list[Claim], *, waits: bool) -> None:
    """Have them all ask, in as few round trips as may be."""
    pipeline = client.pipeline(transaction=False)
    for command in asked(client, claims, waits=waits):
        pipeline.execute_command(*command)
    pipeline.execute()


def test_many_waiters_that_vanished_slow_no_release_and_keep_nobody_out(
    store: Store, client: Any, record_property: Callable[[str, object], None]
) -> None:
    store.acquire(claim("holder"))
    fill(client, [claim(f"w{number}") for number in range(CROWD)], waits=True)
    with store.waiter(claim("alive")) as waiter:
        waiter.ask()
        client.slowlog_reset()
        began = clock()

        assert store.release(claim("holder"), 1) is Answer.DONE

        seconds = clock() - began
        waiter.sleep(20)
        assert clock() - began < 15
        assert isinstance(waiter.ask(), Grant)
    took = sorted(entry["duration"] / 1000 for entry in client.slowlog_get(1_000_000) if b"EVAL" in entry["command"])
    told = f"{seconds:.3f} s in {len(took)} scripts, {statistics.median(took):.3f} ms each, {took[-1]:.3f} at most"
    record_property(f"released past {CROWD} that vanished", told)
    assert statistics.median(took) <= AT_MOST
