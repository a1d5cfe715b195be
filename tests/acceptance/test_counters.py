"""What workers and publishers count arrives, and adds up, however their processes end."""

import re
import subprocess
import sys
import time
from collections import Counter
from signal import SIGTERM
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import Lock, SingletonTask
from celery_singleton_lock.leases.heartbeat import hand_over_counts
from celery_singleton_lock.leases.tally import EVERY
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.web import application
from tests.acceptance.conftest import APP
from tests.browsing import Visitor
from tests.gates import open_gate
from tests.recorder import Recorder
from tests.servers import Server, running
from tests.waiting import until
from tests.workers import workers

COUNTS = "singleton:v2:stats"
# Of a worker, on a machine that is busy.
PROMPTLY = 60


def counted(tasks: Any) -> Counter[str]:
    return Counter(store_of(tasks.app).counted(COUNTS))


def of(tasks: Any, what: str, task: Any) -> int:
    """A counter, or how many a histogram has."""
    numbers = counted(tasks)
    if what in ("held", "waited"):
        fields = [field for field in numbers if field.startswith(f"{what}:") and not field.startswith(f"{what}:sum")]
        return sum(numbers[field] for field in fields if field.endswith(f":{task.name}"))
    return numbers[f"{what}:{task.name}"]


def batches(server: Server) -> int:
    """How often something was handed over, by the notes in the store about the last of each process."""
    with server.client(database=2) as client:
        notes = [value for field, value in client.hgetall(COUNTS).items() if field.startswith("last:")]
    return sum(int(note.rpartition(":")[2]) for note in notes)


def test_all_is_counted_though_each_process_runs_one_task(tasks: Any, env: dict[str, str]) -> None:
    number = 12
    with workers(APP, env, 1, "--max-tasks-per-child", "1", concurrency=2) as (worker,):
        results = [tasks.skipped.delay(key) for key in range(number)]
        assert [result.get(timeout=PROMPTLY) for result in results] == ["ran"] * number
        worker.send(SIGTERM)
        worker.wait(PROMPTLY)

    until(lambda: of(tasks, "acquired:", tasks.skipped) >= number, "all is counted", timeout=PROMPTLY)
    assert of(tasks, "acquired:", tasks.skipped) == number
    assert of(tasks, "held", tasks.skipped) == number
    assert of(tasks, "waited", tasks.skipped) == number


def test_each_end_of_a_call_is_counted(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    task = tasks.by_policy["skip"]
    with workers(APP, env, 1, concurrency=2) as (worker,):
        holder = task.delay("k", 1, 2.0, gate="all are refused")
        until(lambda: recorder.events("enter"), "it runs", timeout=PROMPTLY)
        for _ in range(3):
            with pytest.raises(TaskRevokedError):
                task.delay("k").get(timeout=PROMPTLY)
        open_gate(recorder, "all are refused")
        holder.get(timeout=PROMPTLY)
        # While the processes live, by the thread of the heartbeat.
        until(lambda: of(tasks, "held", task) == 1, "it is counted", timeout=PROMPTLY)
        worker.send(SIGTERM)
        worker.wait(PROMPTLY)

    assert of(tasks, "acquired:", task) == 1
    assert of(tasks, "conflicts:skipped", task) == 3
    numbers = counted(tasks)
    assert numbers[f"held:10:{task.name}"] == 1
    assert numbers[f"held:sum:{task.name}"] >= 2_000_000


def test_who_is_killed_takes_no_more_with_it_than_what_was_not_handed_over(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, env, 1, concurrency=2) as (worker,):
        for key in range(3):
            assert tasks.skipped.delay(key).get(timeout=PROMPTLY) == "ran"
        # Five seconds after it has happened, though the processes go on.
        until(lambda: of(tasks, "held", tasks.skipped) == 3, "it is counted", timeout=PROMPTLY)
        tasks.skipped.delay("k", 60.0)
        until(lambda: len(recorder.events("enter")) == 4, "it runs", timeout=PROMPTLY)
        worker.kill()

    assert of(tasks, "held", tasks.skipped) == 3
    assert of(tasks, "acquired:", tasks.skipped) in (3, 4)


def test_a_process_hands_over_once_in_five_seconds(tasks: Any, env: dict[str, str], valkey: Server) -> None:
    with workers(APP, env, 1, concurrency=1):
        assert tasks.skipped.delay("warm").get(timeout=PROMPTLY) == "ran"
        until(lambda: of(tasks, "held", tasks.skipped) == 1, "it is counted", timeout=PROMPTLY)
        before, began_at, number = batches(valkey), time.monotonic(), 0
        while time.monotonic() - began_at < 2 * EVERY:
            assert tasks.skipped.delay(number).get(timeout=PROMPTLY) == "ran"
            number += 1
        until(lambda: of(tasks, "held", tasks.skipped) == 1 + number, "it is counted", timeout=PROMPTLY)
        handed_over, took = batches(valkey) - before, time.monotonic() - began_at

    assert number > 2
    assert 1 <= handed_over <= 1 + took / EVERY


def test_a_store_that_was_away_is_told_later_and_once() -> None:
    with running("valkey") as own:
        lock = Lock("stock", url=own.url)
        with lock:
            pass
        own.stop()
        hand_over_counts()
        own.start()
        hand_over_counts()
        hand_over_counts()
        numbers = lock._store.counted(COUNTS)
        lock._store.close()

    held = [field for field in numbers if field.startswith("held:") and "sum" not in field]
    assert (numbers["acquired::"], sum(numbers[field] for field in held)) == (1, 1)


def test_what_a_process_with_a_store_in_memory_counts_is_on_its_page() -> None:
    app = Celery("shop", broker="memory://", backend="cache+memory://")
    app.conf.update(task_always_eager=True, singleton_lock_url="memory://")

    @app.task(base=SingletonTask, name="shop.sync")
    def sync() -> None: ...

    sync.delay()
    hand_over_counts()

    reply = Visitor(application(app)).get("/metrics")
    assert 'singleton_lock_acquired_total{task="shop.sync"} 1' in reply.body.splitlines()


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_the_end_of_a_worker_hands_over(tasks: Any, env: dict[str, str], pool: str) -> None:
    with workers(APP, env, 1, pool=pool, concurrency=2) as (worker,):
        assert tasks.skipped.delay("k").get(timeout=PROMPTLY) == "ran"
        worker.send(SIGTERM)
        worker.wait(PROMPTLY)

    assert (of(tasks, "acquired:", tasks.skipped), of(tasks, "held", tasks.skipped)) == (1, 1)


def test_a_lease_that_is_broken_is_counted_as_lost(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    key = tasks.skipped.lock_key_for("k")
    with workers(APP, env, 1) as (worker,):
        holder = tasks.skipped.delay("k", 60.0)
        until(lambda: recorder.events("enter"), "it runs", timeout=PROMPTLY)
        store_of(tasks.app).break_lock(key, None, "alice", force=False)
        with pytest.raises(TaskRevokedError):
            holder.get(timeout=PROMPTLY)
        worker.send(SIGTERM)
        worker.wait(PROMPTLY)

    assert of(tasks, "lost:broken", tasks.skipped) == 1


def test_a_call_that_was_not_published_is_counted_by_its_publisher(tasks: Any) -> None:
    task = tasks.by_mode["until_executed"]
    for _ in range(3):
        task.delay("k")
    hand_over_counts()

    assert of(tasks, "conflicts:unpublished", task) == 2


def test_a_lock_outside_tasks_is_counted_without_its_name(valkey: Server, tasks: Any) -> None:
    url = f"{valkey.url.removesuffix('/0')}/2"
    program = f"""
from celery_singleton_lock import Lock

for number in range(3):
    with Lock(f"of-user-{{number}}", url="{url}"):
        pass
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PROMPTLY)

    numbers = counted(tasks)
    assert numbers["acquired::"] == 3
    buckets = [field for field in numbers if re.fullmatch(r"held:(?!sum).*:", field)]
    assert sum(numbers[field] for field in buckets) == 3
    assert not any("of-user" in field for field in numbers)
