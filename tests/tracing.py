from typing import Any

from celery import Task, uuid
from celery.app.trace import build_tracer


def tracer_of(task: Task) -> Any:
    for each in task.app.tasks.values():
        each.__trace__ = build_tracer(each.name, each, app=task.app)
    return task.__trace__


def traced(task: Task, *args: Any, **request: Any) -> tuple[str, Any]:
    """Run a call in this thread, as a worker does. Return its task id and its outcome."""
    task_id = uuid()
    request = {"id": task_id, "args": args, "kwargs": {}, "is_eager": False, **request}
    return task_id, tracer_of(task)(task_id, args, {}, request).info
