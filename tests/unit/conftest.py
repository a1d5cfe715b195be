from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, uuid
from celery.signals import before_task_publish

from celery_singleton_lock import ConfigurationError, SingletonTask


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    # All apps of a process share the queues in memory.
    app.conf.update(singleton_lock_url=f"memory://{uuid()}", task_default_queue=uuid())
    yield app
    app.close()


def make(app: Celery, base: type = SingletonTask, **options: Any) -> Any:

    @app.task(base=base, name="shop.tasks.sync", shared=False, **options)
    def sync(x: Any, y: Any = 1) -> None: ...

    app.finalize()
    return app.tasks["shop.tasks.sync"]


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(ConfigurationError) as error:
        yield
    assert [each for each in words if each not in str(error.value)] == [], error.value


def headers_of(task: Any, call: Callable[[], Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    def see(headers: Any = None, sender: Any = None, **_: Any) -> None:
        if sender == task.name:
            sent.append(dict(headers))

    before_task_publish.connect(see)
    try:
        call()
    finally:
        before_task_publish.disconnect(see)
    return sent
