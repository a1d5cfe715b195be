"""Tasks with `pydantic=True` on a real worker: one key for what the body receives, and no model in the main process."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.app import base

from tests.recorder import Recorder
from tests.servers import Server
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

if not hasattr(base, "pydantic_wrapper"):
    pytest.skip("this Celery knows no models", allow_module_level=True)

PROMPTLY = 15


@pytest.fixture
def worker(valkey: Server) -> Iterator[Worker]:
    with workers("tests.acceptance.models_app", {"TEST_STORE": valkey.url, "TEST_TTL": "3"}) as (worker,):
        yield worker


@pytest.fixture
def models() -> Any:
    from tests.acceptance import models_app

    return models_app


def test_the_main_process_makes_no_model(models: Any, worker: Worker, recorder: Recorder) -> None:
    sent = [
        models.app.send_task(models.load.name, ({"supplier_id": 1},)),
        models.app.send_task(models.load.name, ({"supplier_id": 2},), expires=datetime.now(UTC) - timedelta(hours=1)),
        models.load_once.apply_async(({"supplier_id": 3},), countdown=0.5),
    ]
    for result in sent:
        result.get(timeout=PROMPTLY, propagate=False)

    makers = {int(pid) for pid in recorder._client.smembers("makers of models")}
    assert makers
    assert worker.pid not in makers
