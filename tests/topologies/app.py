"""An app whose locks are where its broker is, as people write it who have Sentinel, or in a cluster."""

import os
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask
from tests.recorder import Recorder

BROKER = os.environ.get("TEST_BROKER", "redis://127.0.0.1:6379/0")

app = Celery("shop", broker=BROKER, backend=BROKER)
# In a cluster Celery itself can have nothing.
app.conf.singleton_lock_url = os.environ.get("TEST_LOCKS")
app.conf.singleton_lock_replicas = int(os.environ.get("TEST_REPLICAS", "0"))
app.conf.singleton_lock_ttl = float(os.environ.get("TEST_TTL", "30"))
if BROKER.startswith("sentinel"):
    app.conf.broker_transport_options = app.conf.result_backend_transport_options = {"master_name": "locks"}

# Where the test looks on, which no failover concerns.
recorder = Recorder(os.environ.get("TEST_RECORD", "redis://127.0.0.1:6379/3"))


@app.task(base=SingletonTask, bind=True, lock_key=("supplier_id",))
def import_catalogue(self: Any, supplier_id: int) -> str:
    with recorder.body(supplier_id, self.request.id):
        recorder.wait_at(f"end of {self.request.id}")
        self.lock.check()
    return "imported"


@app.task(base=SingletonTask, bind=True, lock_key=("account",), lock_on_conflict="reschedule")
def handle_webhook(self: Any, account: int, number: int) -> int:
    with recorder.body(account, self.request.id, number=number):
        if number < 0:
            recorder.wait_at(f"end of {self.request.id}")
    return number
