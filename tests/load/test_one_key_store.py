"""One key's crowd harms no other key: what a script costs and answers, however many hold, wait or come."""

import statistics
from collections.abc import Callable
from typing import Any

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import RELEASED, Claim, Facts, Grant
from celery_singleton_lock.stores.redis.store import Store
from tests.contract.asking import Waiter
from tests.load.asking import ask_at_once

KEY = "singleton:v3:{shop.tasks.sync:00}"
CROWD = 150
# Milliseconds of the server that a script may take, by the median: many times what it takes on a quiet machine, and
# less than a walk over the whole crowd.
AT_MOST = 5.0


def claim(token: str, limit: int = 1, **more: Any) -> Claim:
    return Claim(KEY, token, 600.0, limit, Facts(f"id-of-{token}", hostname="celery@worker-1", pid=12345), **more)


def test_many_waiters_that_vanished_slow_no_release_and_keep_nobody_out(
    store: Store, client: Any, record_property: Callable[[str, object], None]
) -> None:
    store.acquire(claim("holder"))
    ask_at_once(client, [claim(f"w{number}") for number in range(CROWD)])
    with Waiter(store, claim("alive")) as waiter:
        waiter.ask()
        client.slowlog_reset()
        began = clock()

        assert store.release(claim("holder"), 1) == RELEASED

        seconds = clock() - began
        waiter.sleep(20)
        assert clock() - began < 15
        assert isinstance(waiter.ask(), Grant)
    took = sorted(entry["duration"] / 1000 for entry in client.slowlog_get(1_000_000) if b"EVAL" in entry["command"])
    told = f"{seconds:.3f} s in {len(took)} scripts, {statistics.median(took):.3f} ms each, {took[-1]:.3f} at most"
    record_property(f"released past {CROWD} that vanished", told)
    assert statistics.median(took) <= AT_MOST
