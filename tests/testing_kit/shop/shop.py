"""A shop's tasks, as they run in production."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_singleton_lock import Lock, LockLost, SingletonTask

REDIS = os.environ.get("SHOP_REDIS", "redis://redis.invalid:6379/0")

app = Celery("shop", broker=REDIS, backend=REDIS)
app.conf.singleton_lock_prefix = os.environ.get("SHOP_PREFIX", "singleton")
stock_lock = Lock("stock", app=app)
imports_may_end = threading.Event()


@app.task(base=SingletonTask, lock_key=("supplier_id",))
def import_catalogue(supplier_id: int, full: bool = False) -> str:
    return f"imported {supplier_id}"


@app.task(base=SingletonTask, lock_key=("supplier_id",), lock_on_conflict="raise")
def refresh_prices(supplier_id: int) -> str:
    return f"refreshed {supplier_id}"


@app.task(base=SingletonTask, lock_key=(), lock_on_conflict="reschedule", lock_wait_timeout=600)
def send_newsletter() -> str:
    return "sent"


@app.task(base=SingletonTask, lock_key=("order",), lock_on_conflict="wait")
def number_an_order(order: int) -> str:
    return f"numbered {order}"


@app.task(base=SingletonTask, lock_key=(), lock_min_hold=3600)
def send_report() -> str:
    return "sent"


@app.task(base=SingletonTask, lock_key=(), lock_mode="until_executed")
def rebuild_index() -> str:
    return "rebuilt"


@app.task(base=SingletonTask, lock_key=(), lock_mode="until_executing")
def warm_cache() -> str:
    return "warm"


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


@app.task(base=SingletonTask, bind=True, lock_key=("pool",))
def who_holds(self: Any, pool: str) -> bool:
    return bool(self.lock.held)


def sell() -> str:
    with stock_lock as lease:
        return "sold" if lease.held else "not sold"
