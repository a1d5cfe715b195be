import os

import sentry_sdk
from celery import Celery
from sentry_sdk.integrations.celery import CeleryIntegration

from celery_singleton_lock import SingletonTask

REDIS = os.environ.get("SHOP_REDIS", "redis://localhost")

app = Celery("shop", broker=REDIS, backend=REDIS)
sentry_sdk.init(
    os.environ.get("SENTRY_DSN"),
    integrations=[CeleryIntegration(monitor_beat_tasks=True, exclude_beat_tasks=["stock"])],
)
app.conf.beat_schedule = {
    "prices": {"task": "shop.sync_prices", "schedule": 300.0},
    "stock": {"task": "shop.count_stock", "schedule": 300.0},
    "skipped": {"task": "shop.skipped", "schedule": 300.0},
    "waiting": {"task": "shop.waiting", "schedule": 300.0},
}


@app.task(base=SingletonTask, name="shop.sync_prices", lock_skip_result="on its way")
def sync_prices() -> str:
    return "synced"


@app.task(base=SingletonTask, name="shop.count_stock", lock_mode="until_executed")
@sentry_sdk.monitor(monitor_slug="stock")
def count_stock() -> str:
    return "counted"


@app.task(base=SingletonTask, name="shop.skipped")
def skipped() -> str:
    return "ran"


@app.task(base=SingletonTask, name="shop.waiting", lock_on_conflict="reschedule")
def waiting() -> str:
    return "ran"
