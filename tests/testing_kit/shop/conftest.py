import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

# Set before the import of the shop: parallel tests on one server need different keys.
os.environ["SHOP_PREFIX"] = f"test-{os.environ.get('PYTEST_XDIST_WORKER', 'master')}"

from shop import app, imports_may_end

pytest_plugins = ["celery.contrib.pytest", "celery_singleton_lock.testing"]


@pytest.fixture
def celery_app() -> Iterator[Celery]:
    app.conf.update(broker_url="memory://", result_backend="cache+memory://")
    app.conf.broker_transport_options = {"polling_interval": 0.01}
    app.loader.import_task_module("celery.contrib.testing.tasks")
    imports_may_end.clear()
    yield app
    imports_may_end.set()
    app.close()


@pytest.fixture
def eager(celery_app: Celery) -> Iterator[None]:
    celery_app.conf.task_always_eager = True
    yield
    celery_app.conf.task_always_eager = False


@pytest.fixture
def began(tmp_path: Path) -> Path:
    return tmp_path / "began"


@pytest.fixture
def wait_for() -> Callable[[Callable[[], Any]], None]:
    def wait(condition: Callable[[], Any]) -> None:
        give_up_at = time.perf_counter() + 20
        while not condition():
            assert time.perf_counter() < give_up_at
            time.sleep(0.01)

    return wait
