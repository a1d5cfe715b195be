from kombu import Queue
from kombu.common import Broadcast

from tests.acceptance.combined_app import app, task_with

__all__ = ["app"]

ALL = "everybody"

skipped = task_with("broadcast-skip")

everybody = Broadcast(ALL)
app.conf.task_queues = (Queue("celery"), everybody)
