"""The shop's Celery app. The environment tells one shop from the next."""

import os

from celery import Celery
from redis import Redis

BROKER_URL = os.environ.get("SHOP_BROKER_URL", "redis://127.0.0.1:6379/0")
LOCKED = os.environ.get("SHOP_LOCK", "on") != "off"
# The default of 30 s is right for a shop, but long to look at.
TTL = 4

app = Celery("shop", broker=BROKER_URL, backend=BROKER_URL, include=["example_project.tasks"])
app.conf.update(
    singleton_lock_ttl=TTL,
    # After so long Celery delivers the message of a dead worker again (default: an hour).
    broker_transport_options={"visibility_timeout": 6, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
    # A worker with both hands full leaves a message to the other one.
    worker_disable_prefetch=True,
    broker_connection_retry_on_startup=True,
    beat_schedule={"prices": {"task": "example_project.tasks.sync_prices", "schedule": 1.5}},
)

database = Redis.from_url(BROKER_URL, decode_responses=True)
