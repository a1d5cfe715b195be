"""The app of one scenario: one task of one library, whose body does what it is told.

A Redis list tells the body, because the arguments make the lock's key.
"""

import json
import os
import time
from typing import Any

import redis
from celery import Celery
from celery.exceptions import Ignore

from benchmarks.libraries import named
from tests.recorder import Recorder

STORE = os.environ.get("SCENARIO_STORE", "redis://127.0.0.1:6379/0")
LIBRARY = named(os.environ.get("SCENARIO_LIBRARY", "plain Celery"))
EXPIRY = json.loads(os.environ.get("SCENARIO_EXPIRY", "null"))
_BASE = STORE.removesuffix("/0")

app = Celery("scenario", broker=os.environ.get("SCENARIO_BROKER", STORE), backend=f"{_BASE}/1")
app.conf.update(LIBRARY.settings(f"{_BASE}/2"))
app.conf.update(json.loads(os.environ.get("SCENARIO_SETTINGS", "{}")))
app.conf.broker_connection_retry_on_startup = True
LIBRARY.prepare(app)

recorder = Recorder(f"{_BASE}/3")
orders = redis.Redis.from_url(f"{_BASE}/4", decode_responses=True)


@app.task(name="job", bind=True, **LIBRARY.options(EXPIRY))
def job(self: Any, key: str) -> str:
    """Do the next thing that is ordered for *key*, on the record; without an order, nothing."""
    order, value = json.loads(str(orders.lpop(key) or '["return", null]'))
    with recorder.body(key, self.request.id):
        if order == "sleep":
            time.sleep(value)
        elif order == "retry":
            raise self.retry(countdown=value)
        elif order == "fail":
            raise ValueError(key)
        elif order == "ignore":
            raise Ignore
    return "ran"


@app.task(name="collect")
def collect(results: Any) -> Any:
    """The body of a chord."""
    return results
