import json
import os
from typing import Any

from celery import Celery, shared_task

from celery_singleton_lock import SingletonTask

BROKER = os.environ["TEST_STORE"]
SETTINGS = json.loads(os.environ.get("TEST_SETTINGS", "{}"))

app = Celery("start", broker=BROKER, set_as_current=False)
app.conf.update(singleton_lock_url=BROKER.removesuffix("/0") + "/2", broker_connection_retry_on_startup=True)
app.conf.update({"beat_schedule": {}, "singleton_beat_ttl": 3, **SETTINGS})


def task_of(number: int, options: Any) -> Any:
    define = shared_task if options.pop("is_shared", False) else app.task

    @define(base=SingletonTask, **{"name": f"task-{number}", **options})
    def runs() -> str:
        return "ran"

    return runs


tasks = [task_of(number, options) for number, options in enumerate(json.loads(os.environ.get("TEST_TASKS", "[{}]")))]
