"""An app with whatever tasks and settings a test of the start asks for; run as a program, a process that publishes."""

import json
import logging
import os
import sys
import time
from typing import Any

from celery import Celery, shared_task

from celery_singleton_lock import SingletonTask
from tests.waiting import until

BROKER = os.environ["TEST_STORE"]
SETTINGS = json.loads(os.environ.get("TEST_SETTINGS", "{}"))

app = Celery("start", broker=BROKER, set_as_current=False)
app.conf.update(singleton_lock_url=BROKER.removesuffix("/0") + "/2", broker_connection_retry_on_startup=True)
app.conf.update({"beat_schedule": {}, "singleton_beat_ttl": 3, **SETTINGS})


def task_of(number: int, options: Any) -> Any:
    define = shared_task if options.pop("is_shared", False) else app.task

    @define(base=SingletonTask, **{"name": f"task-{number}", **options})
    def runs(follows: bool = False) -> str:
        if follows:
            tasks[0].delay()
        return "ran"

    return runs


tasks = [task_of(number, options) for number, options in enumerate(json.loads(os.environ.get("TEST_TASKS", "[{}]")))]


@app.task(name="plain")
def plain() -> str:
    return "ran"


class Seen(logging.Handler):
    """What the log was told."""

    lines: list[str] = []  # noqa: RUF012 (there is one)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def took(call: Any) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


if __name__ == "__main__":
    logging.getLogger("celery_singleton_lock").addHandler(Seen())
    # The first publication connects to the broker, which is not what is measured.
    plain.delay()
    seconds = [took(tasks[0].delay) for _ in range(3)]
    until(lambda: Seen.lines, "it is told")
    time.sleep(float(sys.argv[1]))
    sys.stdout.write(json.dumps([max(seconds), Seen.lines]))
