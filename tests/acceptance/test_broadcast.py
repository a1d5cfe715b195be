"""A broadcast queue: each worker gets the message, and none of them is the copy of another."""

import subprocess
import sys
from collections.abc import Iterator
from os import environ

import pytest

from tests.recorder import Event, Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.broadcast_app"

# In a process of its own, because the queues of the app are those of the whole process.
PUBLISH = """
import sys
from tests.acceptance import broadcast_app
from tests.waiting import until
# A worker says that it is ready a moment before it hears what is broadcast.
until(lambda: len(broadcast_app.app.control.ping(timeout=0.5)) == 3, "three workers listen")
task = getattr(broadcast_app, sys.argv[1])
# Where nobody declares it, kombu's Redis takes the exchange for a direct one.
everybody = {"queue": broadcast_app.ALL, "declare": [broadcast_app.everybody.exchange]}
print(task.apply_async((sys.argv[1], 1, float(sys.argv[2])), **everybody).id)
"""


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.prove)])
def three(request: pytest.FixtureRequest, valkey: Server) -> Iterator[tuple[list[Worker], dict[str, str]]]:
    broker = valkey.url if request.param == "redis" else request.getfixturevalue("rabbit")
    env = {"TEST_STORE": valkey.url, "TEST_BROKER": broker, "C_FORCE_ROOT": "1"}
    with workers(APP, env, 3, concurrency=1) as three:
        yield three, env


def published(env: dict[str, str], task: str, seconds: float) -> str:
    command = [sys.executable, "-c", PUBLISH, task, str(seconds)]
    return subprocess.run(command, env={**environ, **env}, capture_output=True, text=True, check=True).stdout.strip()


def bodies(recorder: Recorder, key: str, name: str | None = None) -> list[Event]:
    """Of this key: unlike Redis, RabbitMQ still has what an earlier test has left, which runs here as well."""
    return [event for event in recorder.events(name) if event.key == key]


def received(three: list[Worker], task_id: str) -> int:
    return sum(worker.log().count(f"[{task_id}] received") for worker in three)


def answered(three: list[Worker], task_id: str) -> int:
    """In how many workers Celery or the lock has said more of it than that it was received."""
    return sum(worker.log().count(f"{task_id}") > 1 for worker in three)


def test_siblings_of_a_run_are_skipped_and_publish_nothing(
    three: tuple[list[Worker], dict[str, str]], recorder: Recorder
) -> None:
    pool, env = three
    task_id = published(env, "skipped", 3)
    until(lambda: bodies(recorder, "skipped", "leave"), "it has run")
    until(lambda: answered(pool, task_id) == 3, "each has had it")

    assert len(bodies(recorder, "skipped", "enter")) == 1
    assert received(pool, task_id) == 3
