"""The app of a worker whose pool process dies between a body and the next step of its chain, the first time."""

import os
import signal
from typing import Any

from celery.signals import before_task_publish, worker_process_init

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, body, recorder

__all__ = ["app"]


@app.task(
    base=SingletonTask, bind=True, lock_key=("key",), acks_late=True, reject_on_worker_lost=True, ignore_result=True
)
def first_step(self: Any, key: str, gate: str) -> None:
    body(self, key, 0, gate)


@app.task(ignore_result=True)
def next_step() -> None:
    recorder.write("next", "", "")


def die_once(sender: Any = None, **_: Any) -> None:
    if sender == next_step.name and recorder.is_first(next_step.name):
        os.kill(os.getpid(), signal.SIGKILL)


@worker_process_init.connect
def a_pool_process_may_die(**_: Any) -> None:
    before_task_publish.connect(die_once)
