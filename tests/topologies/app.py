"""An app as people write it who have Sentinel, and nothing else configured."""

import os
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask
from tests.recorder import Recorder

URL = os.environ.get("TEST_SENTINELS", "sentinel://127.0.0.1:26379")

app = Celery("shop", broker=URL, backend=URL)
app.conf.broker_transport_options = {"master_name": "locks"}
app.conf.result_backend_transport_options = {"master_name": "locks"}
app.conf.singleton_lock_replicas = int(os.environ.get("TEST_REPLICAS", "0"))

# Where the test looks on, which no failover concerns.
recorder = Recorder(os.environ.get("TEST_RECORD", "redis://127.0.0.1:6379/3"))


@app.task(base=SingletonTask, bind=True, lock_key=("supplier_id",))
def import_catalogue(self: Any, supplier_id: int) -> str:
    with recorder.body(supplier_id, self.request.id):
        recorder.wait_at(f"end of {self.request.id}")
        self.lock.check()
    return "imported"
