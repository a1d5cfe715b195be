import os
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_singleton_lock import LockLost, SingletonTask

REDIS = os.environ.get("SHOP_REDIS", "redis://redis.invalid:6379/0")

app = Celery("shop", broker=REDIS, backend=REDIS)
app.conf.singleton_lock_prefix = os.environ.get("SHOP_PREFIX", "singleton")
imports_may_end = threading.Event()


@app.task(base=SingletonTask, lock_key=("supplier_id",))
def import_catalogue(supplier_id: int, full: bool = False) -> str:
    return f"imported {supplier_id}"


@app.task(base=SingletonTask, lock_key=(), lock_min_hold=3600)
def send_report() -> str:
    return "sent"


@app.task(base=SingletonTask, lock_key=(), lock_mode="until_executed")
def rebuild_index() -> str:
    return "rebuilt"


@app.task(base=SingletonTask, bind=True, lock_key=(), lock_ttl=3)
def import_slowly(self: Any, began: str) -> str:
    Path(began).write_text("here I am")
    try:
        until = time.monotonic() + 30
        while time.monotonic() < until and not imports_may_end.is_set():
            time.sleep(0.01)
    except LockLost as error:
        return f"lost: {error.reason}"
    return "imported"


@app.task(base=SingletonTask, bind=True, lock_key=(), lock_name="shop.import_slowly")
def take_over(self: Any) -> bool:
    return bool(self.lock.took_over)
