"""An app with a quorum queue on a topic exchange, where RabbitMQ itself delays messages, by whole seconds."""

import os
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import body

STORE = os.environ.get("TEST_STORE", "redis://127.0.0.1:6379/0").removesuffix("/0")
QUEUE = "quorum-jobs"

app = Celery("quorum", broker=os.environ.get("TEST_BROKER"), backend=f"{STORE}/1", set_as_current=False)
app.conf.update(
    singleton_lock_url=f"{STORE}/2",
    singleton_lock_ttl=3,
    broker_connection_retry_on_startup=True,
    broker_native_delayed_delivery_queue_type="classic",
    task_default_queue=QUEUE,
    task_default_queue_type="quorum",
    task_default_exchange=QUEUE,
    task_default_exchange_type="topic",
    task_default_routing_key=QUEUE,
    worker_detect_quorum_queues=True,
)


def task_with(policy: str) -> Any:
    @app.task(base=SingletonTask, bind=True, name=f"quorum-{policy}", lock_key=("key",), lock_on_conflict=policy)
    def runs(self: Any, key: Any, number: int = 0, gate: str | None = None) -> int:
        body(self, key, gate=gate, number=number)
        return number

    return runs


by_policy = {policy: task_with(policy) for policy in ("skip", "reschedule", "rerun", "join")}
