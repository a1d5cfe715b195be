"""The tasks of these tests, shared by whatever app the publisher and the workers have."""

import os
import time
from typing import Any

from celery import Task, shared_task

from celery_singleton_lock import SingletonTask, current_lease
from tests.recorder import Recorder

TTL = 4.0
SETTINGS = {
    "singleton_lock_ttl": TTL,
    "broker_connection_retry_on_startup": True,
    "broker_transport_options": {
        # After so long Redis delivers the messages of a dead worker again; RabbitMQ does at once.
        "visibility_timeout": 5,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    # A worker with both hands full leaves a message to the other one.
    "worker_prefetch_multiplier": 1,
}

recorder = Recorder(os.environ.get("TEST_RECORD", "redis://127.0.0.1:6379/0"))


def body(task: Any, key: str, seconds: float) -> None:
    """Be busy for so long, on the record."""
    lease = current_lease()
    facts = {"fence": lease.fence, "took_over": lease.took_over} if lease else {}
    with recorder.body(key, task.request.id, worker=task.request.hostname, **facts):
        time.sleep(seconds)


@shared_task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict="reschedule")
def locked(self: Any, key: str, number: int, seconds: float = 0.05) -> int:
    body(self, key, seconds)
    return number


@shared_task(base=SingletonTask, bind=True, lock_key=("key",), lock_on_conflict="reschedule", acks_late=True)
def acked_late(self: Any, key: str, number: int, hang: float = 0.0) -> int:
    """Hangs the first time it is tried."""
    body(self, key, hang if hang and recorder.is_first(self.request.id) else 0.05)
    return number


@shared_task(base=Task, bind=True)
def unlocked(self: Any, key: str, number: int, seconds: float = 0.05) -> int:
    body(self, key, seconds)
    return number
