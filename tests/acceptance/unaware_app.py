"""An app whose code never imports the library: a task has an option of it, and the beat its scheduler by a setting."""

import os

from celery import Celery
from click import Option

BROKER = os.environ["TEST_STORE"]

app = Celery("unaware", broker=BROKER, set_as_current=False)
app.conf.update(
    singleton_lock_url=os.environ.get("TEST_LOCKS", BROKER),
    beat_scheduler="celery_singleton_lock.beat:SingletonScheduler",
    broker_connection_retry_on_startup=True,
)


app.user_options["preload"].add(Option(["--site"], default=""))


@app.task(name="bare", lock_ttl=10)
def bare() -> None: ...
