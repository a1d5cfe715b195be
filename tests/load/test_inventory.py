"""A list of locks among very many other keys stops the server for nobody."""

import statistics
from collections import Counter
from typing import Any

from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from tests.load.asking import ask_at_once
from tests.servers import Server

FOREIGN, LOCKS, WAITERS = 200_000, 2_000, 5_000
CROWDED = "singleton:v3:{shop.crowded:00}"
# Milliseconds of the server that one call may take: many times what it takes, and less than a look at all waiters.
AT_MOST = 5.0
# A machine that is busy with other things makes a single call longer.
OF_A_HUNDRED = 3
SAMPLES = 50


def fill(client: Any, store: Store) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for number in range(FOREIGN):
            pipeline.set(f"celery-task-meta-{number}", "result")
            if number % 10_000 == 0:
                pipeline.execute()
        pipeline.execute()
    for number in range(LOCKS):
        store.acquire(Claim(f"singleton:v3:{{shop.{number}:00}}", "a", 600.0, task_id=f"id-{number}"))
    store.acquire(Claim(CROWDED, "a", 600.0))
    ask_at_once(client, [Claim(CROWDED, f"w{number}", 600.0) for number in range(WAITERS)])


def test_no_call_of_a_list_stops_the_server(store: Store, client: Any, record_property: Any, server: Server) -> None:
    fill(client, store)
    client.slowlog_reset()

    surveys = store.survey(list(Inventory(store).keys("singleton:v3:{")))

    took = Counter[str]()
    slow = Counter[str]()
    for entry in client.slowlog_get(1_000_000):
        name = entry["command"].split()[0]
        name = name if isinstance(name, str) else name.decode()
        took[name] += 1
        slow[name] += entry["duration"] / 1000 > AT_MOST
    record_property("calls", dict(took))
    record_property("slow", dict(slow))
    assert len(surveys) == LOCKS + 1
    (crowded,) = [survey for survey in surveys if survey.key == CROWDED]
    assert crowded.waiting == WAITERS
    assert took["SCAN"] > FOREIGN / 1000
    assert "KEYS" not in took
    assert sum(slow.values()) * 100 <= OF_A_HUNDRED * sum(took.values()), (took, slow)

    client.slowlog_reset()
    for _ in range(SAMPLES):
        store.survey([CROWDED])
    scripts = [entry for entry in client.slowlog_get(1_000_000) if entry["command"].startswith(b"EVALSHA")]
    assert statistics.median(entry["duration"] / 1000 for entry in scripts) <= AT_MOST
