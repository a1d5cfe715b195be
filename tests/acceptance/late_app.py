"""An app that makes its tasks, and imports the library, only as its worker starts."""

import os

from celery import Celery
from celery.signals import worker_init

app = Celery("late", broker=os.environ["TEST_STORE"], set_as_current=False)
app.conf.update(result_backend=os.environ["TEST_STORE"], broker_connection_retry_on_startup=True)


@worker_init.connect(weak=False)
def make_tasks(**_: object) -> None:
    from celery_singleton_lock import SingletonTask

    @app.task(base=SingletonTask, name="task", lock_key=(), lock_on_conflict="wait")
    def task() -> None: ...
