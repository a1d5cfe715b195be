"""Tasks with a request class of their own, as a company has one for all its tasks."""

import time
from typing import Any

from celery import Task
from celery.worker.request import Request

from celery_singleton_lock import SingletonTask
from tests.acceptance.app import app, recorder

__all__ = ["app"]


class Told(Request):
    """It tells of each failure that the main process hears of."""

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.write("told", self.args[0], self.id, error=type(exc_info.exception).__name__)
        return super().on_failure(exc_info, *args, **kwargs)


class CompanyTask(Task):
    abstract = True
    Request = "tests.acceptance.request_app:Told"


def task_of(name: str, *bases: type) -> Any:
    own = {} if CompanyTask in bases else {"Request": Told}
    base = type(name, bases, {"abstract": True, **own})

    @app.task(base=base, bind=True, name=f"request-{name}", lock_key=("key",), lock_ttl=60)
    def stay(self: Any, key: str) -> None:
        with recorder.body(key, self.request.id):
            time.sleep(60)

    return stay


CLASSES = {"own": (SingletonTask,), "behind": (SingletonTask, CompanyTask), "before": (CompanyTask, SingletonTask)}
TASKS = {name: task_of(name, *bases) for name, bases in CLASSES.items()}
