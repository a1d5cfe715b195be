"""Which process may have locks in its memory that publishes calls."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, uuid
from celery.concurrency.solo import TaskPool as Solo

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.own_process import check_publishing_process
from celery_singleton_lock.start import _in_background, check_worker
from tests.waiting import until


def look(url: str | None, broker: Any) -> None:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.singleton_lock_url = url

    check_publishing_process(app, SimpleNamespace(name="sync"))


@pytest.mark.parametrize("broker", ["redis://", ["amqp://a", "amqp://b"], None])
def test_marks_that_no_worker_ends_are_refused(broker: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^singleton_lock_url='memory://' .* a call of sync "):
        look("memory://", broker)


@pytest.mark.parametrize(
    ("url", "broker"),
    [("memory://", "memory://"), ("memory://", ["memory://"]), ("redis://", "amqp://"), (None, "redis://")],
    ids=["its own worker", "one of a list", "a server", "the broker"],
)
def test_all_others_may_publish(url: str | None, broker: Any) -> None:
    look(url, broker)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    """One that publishes to workers in other processes."""
    app = Celery("shop", broker="filesystem://", backend="cache+memory://", set_as_current=False)
    folders = dict.fromkeys(("data_folder_in", "data_folder_out", "control_folder"), str(tmp_path))
    app.conf.update(singleton_lock_url=f"memory://{uuid()}", broker_transport_options=folders)
    yield app
    app.close()


def publish(app: Celery, **options: Any) -> None:
    @app.task(base=SingletonTask, name=uuid(), shared=False, **options)
    def sync() -> None: ...

    for _ in range(3):
        sync.delay()


def told(caplog: pytest.LogCaptureFixture) -> int:
    """How often, once all is told."""
    until(lambda: not _in_background._thread.runs, "nothing is left to tell")
    return caplog.text.count("lock.misconfigured")


def test_it_is_told_once_when_a_call_is_marked(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    publish(app)
    assert told(caplog) == 0

    publish(app, lock_mode="until_executed")
    publish(app, lock_mode="until_executing")
    assert told(caplog) == 1


def test_it_is_not_told_if_calls_run_here(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    app.conf.task_always_eager = True
    publish(app, lock_mode="until_executed")

    assert told(caplog) == 0


def test_it_is_not_told_beside_a_worker(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    check_worker(app, Solo)
    publish(app, lock_mode="until_executed")

    assert told(caplog) == 0
