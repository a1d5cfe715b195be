"""Serial work by key: how long a burst takes beside plain Celery, which excludes nothing, and how many run out of turn.

The calls of each key are published one after the other, key by key, so the first calls of the queue have one key.
"""

import os
import time
from itertools import pairwise
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock import SingletonTask
from tests.servers import running
from tests.waiting import until
from tests.workers import workers

SECONDS, PROCESSES = 0.1, 4
BURSTS = ((10, 20), (1, 60))
"""Keys, and calls of each."""

app = Celery("bursts", broker=os.environ.get("BURSTS_URL"), backend=os.environ.get("BURSTS_URL"))


def _body(url: str, key: int, number: int) -> None:
    begun = time.time()
    time.sleep(SECONDS)
    with redis.Redis.from_url(url) as seen:
        seen.rpush("seen", f"{begun} {key} {number}")


plain = app.task(name="plain Celery")(_body)
ours = app.task(base=SingletonTask, name="reschedule", lock_key=("key",), lock_on_conflict="reschedule")(_body)


def burst(task: Any, url: str, seen: Any, keys: int, calls: int) -> tuple[float, int]:
    """Seconds that all of it takes, and how many calls began before the one that was published before them."""
    began = time.time()
    for key in range(keys):
        for number in range(calls):
            task.delay(url, key, number)
    until(lambda: seen.llen("seen") == keys * calls, "all have run", timeout=300)
    took = time.time() - began
    rows = sorted(
        (float(begun), int(key), int(number)) for begun, key, number in map(str.split, seen.lrange("seen", 0, -1))
    )
    seen.delete("seen")
    order = [[number for _, key, number in rows if key == each] for each in range(keys)]
    return took, sum(earlier > later for each in order for earlier, later in pairwise(each))


if __name__ == "__main__":
    with running("valkey") as server, server.client(database=2) as seen:
        app.conf.update(broker_url=server.url, result_backend=server.url)
        url = f"{server.url.removesuffix('/0')}/2"
        with workers("benchmarks.bursts", {"BURSTS_URL": server.url}, concurrency=PROCESSES):
            # The first calls connect.
            burst(plain, url, seen, PROCESSES, 1)
            for keys, calls in BURSTS:
                for task in (plain, ours, plain, ours):
                    took, turned = burst(task, url, seen, keys, calls)
                    print(f"{task.name}, {keys} x {calls}: {took:.1f} s, {turned} out of turn")  # noqa: T201
