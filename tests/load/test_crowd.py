"""Ten thousand messages on one key: all of them run, none waits for ever, and Redis is not asked without bound."""

from collections.abc import Callable

import pytest

from tests.acceptance.app import app, crowded
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

MESSAGES = 10_000


@pytest.fixture
def env(valkey: Server) -> dict[str, str]:
    base = valkey.url.removesuffix("/0")
    app.conf.update(broker_url=valkey.url, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
    return {"TEST_STORE": valkey.url}


def test_a_crowd_on_one_key_runs_to_its_last_message(
    env: dict[str, str], valkey: Server, record_property: Callable[[str, object], None]
) -> None:
    record = valkey.client(database=3)
    with (
        workers("tests.acceptance.app", env, 2, concurrency=4),
        valkey.client() as client,
        app.producer_pool.acquire() as producer,
    ):
        client.config_resetstat()
        for number in range(MESSAGES):
            crowded.apply_async((number,), producer=producer, ignore_result=True)
        until(lambda: record.llen("crowd") >= MESSAGES, "all have run", timeout=900)
        scripts = sum(stats["calls"] for name, stats in client.info("commandstats").items() if "eval" in name)

    assert sorted(int(number) for number in record.lrange("crowd", 0, -1)) == list(range(MESSAGES))
    # Two where nobody else wants the key. The figure goes into the report of the run.
    record_property("scripts a message", scripts / MESSAGES)
    assert scripts < 10 * MESSAGES
