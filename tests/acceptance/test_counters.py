"""What workers and publishers count arrives on the page for Prometheus, and adds up, however their processes end."""

import re
import select
import subprocess
import sys
from signal import SIGTERM
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock.settings import store_of
from celery_singleton_lock.web import application
from tests.acceptance.conftest import APP
from tests.browsing import Visitor
from tests.gates import open_gate
from tests.recorder import Recorder
from tests.servers import Server, running
from tests.waiting import until
from tests.workers import workers

# Of a worker, on a machine that is busy.
PROMPTLY = 60


def counted(app: Any) -> dict[str, float]:
    """The samples of the page by name and labels."""
    text = Visitor(application(app)).get("/metrics").body
    return {name: float(value) for name, value in re.findall(r"^singleton_lock_(\S+) (\S+)$", text, re.MULTILINE)}


def of(tasks: Any, what: str, task: Any, more: str = "") -> float:
    return counted(tasks.app).get(f'{what}{{{more}task="{task.name}"}}', 0)


@pytest.mark.prove
def test_all_is_counted_though_each_process_runs_one_task(tasks: Any, env: dict[str, str]) -> None:
    number = 6
    with workers(APP, env, 1, "--max-tasks-per-child", "1", concurrency=2) as (worker,):
        results = [tasks.skipped.delay(key) for key in range(number)]
        assert [result.get(timeout=PROMPTLY) for result in results] == ["ran"] * number
        worker.send(SIGTERM)
        worker.wait(PROMPTLY)

    until(lambda: of(tasks, "acquired_total", tasks.skipped) >= number, "all is counted", timeout=PROMPTLY)
    whats = ("acquired_total", "held_seconds_count", "waited_seconds_count")
    assert [of(tasks, what, tasks.skipped) for what in whats] == [number] * 3


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
        # While the processes live, within seconds.
        until(lambda: of(tasks, "held_seconds_count", task) == 1, "it is counted", timeout=PROMPTLY)
        broken = tasks.skipped.delay("k", 60.0)
        until(lambda: len(recorder.events("enter")) == 2, "it runs", timeout=PROMPTLY)
        store_of(tasks.app).break_lock(tasks.skipped.lock_key_for("k"), None, "alice", force=False)
        with pytest.raises(TaskRevokedError):
            broken.get(timeout=PROMPTLY)
        worker.send(SIGTERM)
        worker.wait(PROMPTLY)

    assert of(tasks, "acquired_total", task) == 1
    assert of(tasks, "conflicts_total", task, 'outcome="skipped",') == 3
    assert of(tasks, "held_seconds_sum", task) >= 2
    assert of(tasks, "lost_total", tasks.skipped, 'reason="broken",') == 1


@pytest.mark.prove
@pytest.mark.parametrize(("policy", "outcome"), [("reschedule", "rescheduled"), ("join", "joined")])
def test_a_call_that_asks_again_and_again_is_one_conflict(
    tasks: Any, env: dict[str, str], recorder: Recorder, policy: str, outcome: str
) -> None:
    task = tasks.by_policy[policy]
    with workers(APP, env, 1, "--loglevel", "DEBUG", concurrency=2) as (worker,):
        holder = task.delay("k", 1, 0.0, gate="it has asked often")
        until(lambda: recorder.events("enter"), "it runs", timeout=PROMPTLY)
        again = task.delay("k")
        until(lambda: polls(worker.log()) >= 3, "it asks again", timeout=PROMPTLY)
        open_gate(recorder, "it has asked often")
        for result in (holder, again):
            result.get(timeout=PROMPTLY)
        worker.send(SIGTERM)
        worker.wait(PROMPTLY)
        lines = [line for line in worker.log().splitlines() if "lock.conflict" in line]

    assert sum("INFO" in line for line in lines) == 1
    assert of(tasks, "conflicts_total", task, f'outcome="{outcome}",') == 1


def polls(log: str) -> int:
    return sum("lock.conflict" in line for line in log.splitlines())


@pytest.mark.prove
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_the_end_of_a_worker_hands_over(tasks: Any, env: dict[str, str], pool: str) -> None:
    with workers(APP, env, 1, pool=pool, concurrency=2) as (worker,):
        assert tasks.skipped.delay("k").get(timeout=PROMPTLY) == "ran"
        worker.send(SIGTERM)
        worker.wait(PROMPTLY)

    assert (of(tasks, "acquired_total", tasks.skipped), of(tasks, "held_seconds_count", tasks.skipped)) == (1, 1)


def program(code: str, *arguments: str) -> "subprocess.Popen[str]":
    """A process of its own, because this one hands over nothing during a test."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


PUBLISHES = """
import sys
from celery import Celery
from celery_singleton_lock import Lock, SingletonTask

app = Celery("shop", broker="memory://")
app.conf.singleton_lock_url = sys.argv[1]

@app.task(base=SingletonTask, name="shop.sync", lock_mode="until_executed")
def sync(): ...

for number in range(3):
    sync.delay()
    with Lock(f"of-user-{number}", app=app):
        pass
"""


@pytest.mark.prove
def test_a_publisher_counts_what_it_has_not_published_and_its_locks_without_their_names(
    tasks: Any, valkey: Server
) -> None:
    with program(PUBLISHES, tasks.app.conf.singleton_lock_url) as it:
        assert it.wait(PROMPTLY) == 0

    numbers = counted(tasks.app)
    assert numbers['conflicts_total{outcome="unpublished",task="shop.sync"}'] == 2
    assert (numbers['acquired_total{task=""}'], numbers['held_seconds_count{task=""}']) == (3, 3)
    assert not any("of-user" in name for name in numbers)


LOSES_ITS_STORE = """
import logging, sys
from celery_singleton_lock import Lock

class Tell(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("lock.uncounted "):
            print(record.getMessage(), flush=True)

log = logging.getLogger("celery_singleton_lock")
log.setLevel(logging.INFO)
log.addHandler(Tell())
with Lock("stock", url=sys.argv[1]):
    pass
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.mark.prove
def test_a_store_that_was_away_is_told_later(tasks: Any) -> None:
    with running("valkey") as own, program(LOSES_ITS_STORE, own.url) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "released\n"
        own.stop()
        assert select.select([it.stdout], [], [], PROMPTLY)[0], "it has noticed"
        assert it.stdout.readline().startswith("lock.uncounted ")
        own.start()
        it.communicate("it is back\n", timeout=PROMPTLY)
        tasks.app.conf.singleton_lock_url = own.url
        numbers = counted(tasks.app)
        store_of(tasks.app).close()

    assert (numbers['acquired_total{task=""}'], numbers['held_seconds_count{task=""}']) == (1, 1)


IN_MEMORY = """
from celery import Celery
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.web import application
from tests.browsing import Visitor
from tests.waiting import until

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.update(task_always_eager=True, singleton_lock_url="memory://")

@app.task(base=SingletonTask, name="shop.sync")
def sync(): ...

sync.delay()
line = 'singleton_lock_acquired_total{task="shop.sync"} 1.0'
until(lambda: line in Visitor(application(app)).get("/metrics").body, "it is counted", timeout=60)
"""


@pytest.mark.prove
def test_what_a_process_with_a_store_in_memory_counts_is_on_its_page() -> None:
    with program(IN_MEMORY) as it:
        assert it.wait(PROMPTLY + 30) == 0
