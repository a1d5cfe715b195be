"""A broadcast queue: each worker gets the message, and none of them is the copy of another."""

import subprocess
import sys
from os import environ

import pytest

from tests.recorder import Recorder, of_key
from tests.waiting import until
from tests.workers import workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.broadcast_app"

# In a process of its own, because the queues of the app are those of the whole process.
KEY = "broadcast"
PUBLISH = """
from tests.acceptance import broadcast_app
from tests.waiting import until
# A worker says that it is ready a moment before it hears what is broadcast.
until(lambda: len(broadcast_app.app.control.ping(timeout=0.5)) == 3, "three workers listen")
# Where nobody declares it, kombu's Redis takes the exchange for a direct one.
everybody = {"queue": broadcast_app.ALL, "declare": [broadcast_app.everybody.exchange]}
print(broadcast_app.skipped.apply_async(("broadcast", 1, 3), **everybody).id)
"""


def test_siblings_of_a_run_are_skipped_and_publish_nothing(broker: str, recorder: Recorder) -> None:
    with workers(APP, {"TEST_BROKER": broker}, 3, concurrency=1) as three:
        command = [sys.executable, "-c", PUBLISH]
        env = {**environ, "TEST_BROKER": broker}
        task_id = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()
        # RabbitMQ still has what an earlier test has left, and Celery says more of a message than that it came.
        until(lambda: of_key(recorder, KEY, "leave"), "it has run")
        until(lambda: all(worker.log().count(task_id) > 1 for worker in three), "each has had it")

        assert [worker.log().count(f"[{task_id}] received") for worker in three] == [1, 1, 1]
    assert len(of_key(recorder, KEY, "enter")) == 1
