"""What runs a task in a worker."""

from typing import Any

from celery import Task
from celery.app.trace import build_tracer


def tracer_of(task: Task) -> Any:
    """As a worker makes it, of all its tasks, before the first message."""
    for each in task.app.tasks.values():
        each.__trace__ = build_tracer(each.name, each, app=task.app)
    return task.__trace__
