"""The shop's Celery app. The environment tells one shop from the next."""

import os

from celery import Celery
from redis import Redis

BROKER_URL = os.environ.get("SHOP_BROKER_URL", "redis://127.0.0.1:6379/0")
LOCKED = os.environ.get("SHOP_LOCK", "on") != "off"
# Seconds. The default of 30 would be long for a demonstration.
TTL = 4

app = Celery("shop", broker=BROKER_URL, backend=BROKER_URL, include=["example_project.tasks"])
app.conf.update(
    singleton_lock_ttl=TTL,
    # Seconds until Celery delivers the message of a dead worker again (default: an hour).
    broker_transport_options={"visibility_timeout": 6, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
    # A worker with both processes busy leaves a message to the other worker.
    worker_disable_prefetch=True,
    broker_connection_retry_on_startup=True,
    beat_schedule={"prices": {"task": "example_project.tasks.sync_prices", "schedule": 1.5}},
)

database = Redis.from_url(BROKER_URL, decode_responses=True)
