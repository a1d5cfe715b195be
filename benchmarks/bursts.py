"""Serial work by key, beside plain Celery: the time that a burst takes, and the time that its key is idle.

`burst` publishes the calls of each key one after the other, key by key, so the first calls of the queue have one key.
Plain Celery excludes nothing there. `idle_between` publishes calls of one key, and looks at the time from the end of
each body to the start of the next one. There plain Celery has one process, and so runs one call at a time.
"""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
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

BODY, ROUNDS = 0.02, 3
HAND_OVERS = (60, 300)
"""Calls of one key; to two workers with two processes each, or to one process of plain Celery."""

app = Celery("bursts", broker=os.environ.get("BURSTS_URL"), backend=os.environ.get("BURSTS_URL"))
app.conf.task_routes = {"plain Celery, one process": "one process", "handed over": "two workers"}


def _body(url: str, key: int, number: int) -> None:
    begun = time.time()
    time.sleep(SECONDS)
    with redis.Redis.from_url(url) as seen:
        seen.rpush("seen", f"{begun} {key} {number}")


def _timed(path: str) -> None:
    begun = time.monotonic()
    time.sleep(BODY)
    with Path(path).open("a") as seen:
        # The clock is the same in all processes of a machine.
        seen.write(f"{begun} {time.monotonic()}\n")


plain = app.task(name="plain Celery")(_body)
ours = app.task(base=SingletonTask, name="reschedule", lock_key=("key",), lock_on_conflict="reschedule")(_body)
alone = app.task(name="plain Celery, one process")(_timed)
handed = app.task(base=SingletonTask, name="handed over", lock_key=(), lock_on_conflict="reschedule")(_timed)


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


def idle_between(task: Any, calls: int) -> list[float]:
    """Seconds from the end of each body to the start of the next one; negative if two ran at once."""
    with tempfile.NamedTemporaryFile() as seen:
        path = Path(seen.name)
        for _ in range(calls):
            task.delay(seen.name)
        until(lambda: path.read_text().count("\n") == calls, "all have run", timeout=300)
        rows = sorted(tuple(map(float, row.split())) for row in path.read_text().splitlines())
    return [begun - ended for (_, ended), (begun, _) in pairwise(rows)]


def _compare_bursts(env: dict[str, str], url: str, seen: Any) -> None:
    with workers("benchmarks.bursts", env, concurrency=PROCESSES):
        # The first calls connect.
        burst(plain, url, seen, PROCESSES, 1)
        for keys, calls in BURSTS:
            for task in (plain, ours, plain, ours):
                took, turned = burst(task, url, seen, keys, calls)
                print(f"{task.name}, {keys} x {calls}: {took:.1f} s, {turned} out of turn")  # noqa: T201


def _compare_hand_overs(env: dict[str, str]) -> None:
    with (
        workers("benchmarks.bursts", env, 1, "-Q", "one process", concurrency=1),
        workers("benchmarks.bursts", env, 2, "-Q", "two workers", concurrency=2),
    ):
        for calls in HAND_OVERS:
            found = defaultdict[str, list[float]](list)
            for _ in range(ROUNDS):
                for task in (alone, handed):
                    found[task.name] += idle_between(task, calls)
            for name, idle in found.items():
                assert min(idle) > 0, "one at a time"
                median, p95 = statistics.median(idle), statistics.quantiles(idle, n=20)[-1]
                words = f"median {1e3 * median:.1f}, p95 {1e3 * p95:.1f}, longest {1e3 * max(idle):.0f} ms"
                print(f"{name}, {ROUNDS} x {calls}: idle for {words}; {sum(idle) / ROUNDS:.2f} s in all")  # noqa: T201


if __name__ == "__main__":
    with running("valkey") as server, server.client(database=2) as seen:
        app.conf.update(broker_url=server.url, result_backend=server.url)
        env = {"BURSTS_URL": server.url}
        _compare_bursts(env, f"{server.url.removesuffix('/0')}/2", seen)
        _compare_hand_overs(env)
