"""Tasks that have something to tell, and their log in JSON, as docs/reference/log.md says how to write it."""

import logging
import os
from typing import Any

from celery.signals import worker_init
from pythonjsonlogger.json import JsonFormatter

from celery_singleton_lock import Lock, LockLost, SingletonTask, signals
from tests.acceptance.app import app, body, by_mode, by_policy, recorder, task_with
from tests.acceptance.children_app import holding_the_gil

__all__ = ["app", "by_mode", "by_policy"]


def handler_to(path: str) -> logging.Handler:
    handler = logging.FileHandler(path)
    handler.setFormatter(JsonFormatter("%(levelname)s"))
    return handler


def write_json(**_: Any) -> None:
    logger = logging.getLogger("celery_singleton_lock")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler_to(os.environ["TEST_LOG"]))


def route(name: str, args: Any, *_: Any, **__: Any) -> None:
    if "unroutable" in args:
        raise LookupError(name)


def wait_after_the_release(sender: Any = None, **_: Any) -> None:
    if getattr(sender, "name", "") == "told.late":
        recorder.write("released", "late", "")
        recorder.wait_at("the store is silent")


# In the worker alone: other tests have this app, too.
if "TEST_LOG" in os.environ:
    worker_init.connect(write_json)
    signals.lock_released.connect(wait_after_the_release)
    app.conf.update(
        task_routes=(route,),
        result_backend=os.environ["TEST_RESULTS"],
        result_backend_transport_options={"retry_policy": {"max_retries": 0}},
        task_publish_retry_policy={"max_retries": 1},
    )


def stubborn(name: str, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name=name, lock_key=("key",), **options)
    def takes_its_time(self: Any, key: str, gate: str, seconds: float = 600.0) -> None:
        try:
            body(self, key, seconds)
        except LockLost:
            recorder.write("asked to stop", key, self.request.id)
            recorder.wait_at(gate)
            raise

    return takes_its_time


broken = stubborn("told.broken", lock_label="supplier {key}")
replaced = stubborn("told.replaced", lock_on_conflict="replace")
waits = task_with("told.waits", lock_on_conflict="wait", time_limit=12)
# Its lease is still there as its main process hears of its death, which may take Celery some seconds.
killed = task_with("told.killed", lock_ttl=60)
warned = task_with("told.warned", lock_on_lost="warn")
late = task_with("told.late", acks_late=True)
holds_the_gil = holding_the_gil("told.holds_the_gil", 8)


@app.task(base=SingletonTask, lock_key=())
def leaves_a_lock() -> None:
    Lock("left", app=app).acquire()
