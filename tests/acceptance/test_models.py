"""Tasks with `pydantic=True` on a real worker: one key for what the body receives, and no model in the main process."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.app import base
from celery.exceptions import TaskRevokedError

from tests.gates import open_gate
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

pytestmark = pytest.mark.prove

if not hasattr(base, "pydantic_wrapper"):
    pytest.skip("this Celery knows no models", allow_module_level=True)

PROMPTLY = 15


@pytest.fixture
def worker(valkey: Server) -> Iterator[Worker]:
    with workers("tests.acceptance.models_app", {"TEST_STORE": valkey.url, "TEST_TTL": "3"}, 1) as (worker,):
        yield worker


@pytest.fixture
def models(tasks: Any) -> Any:
    from tests.acceptance import models_app

    return models_app


def publish(models: Any, by_name: bool, *args: Any) -> Any:
    return models.app.send_task(models.load.name, args) if by_name else models.load.delay(*args)


@pytest.mark.parametrize("by_name", [False, True], ids=["delay", "send_task"])
def test_a_default_of_the_model_counts_as_if_it_had_been_passed(
    models: Any, worker: Worker, recorder: Recorder, by_name: bool
) -> None:
    holder = publish(models, by_name, {"supplier_id": 1}, "ends")
    until(lambda: recorder.events("enter"), "it runs")
    duplicate = publish(models, by_name, {"supplier_id": 1, "full": False}, "ends")

    with pytest.raises(TaskRevokedError, match=holder.id):
        duplicate.get(timeout=PROMPTLY)
    assert publish(models, by_name, {"supplier_id": 1, "full": True}).get(timeout=PROMPTLY) == "ran"
    open_gate(recorder, "ends")
    assert holder.get(timeout=PROMPTLY) == "ran"


@pytest.mark.parametrize("name", ["load", "load_once"])
def test_what_is_no_model_is_published_and_fails_in_the_worker(models: Any, worker: Worker, name: str) -> None:
    result = getattr(models, name).delay({"supplier_id": "none"})

    with pytest.raises(Exception, match="ValidationError"):
        result.get(timeout=PROMPTLY)
    assert result.state == "FAILURE"
    assert models.load.delay({"supplier_id": 1}).get(timeout=PROMPTLY) == "ran"


def test_the_main_process_makes_no_model(models: Any, worker: Worker, recorder: Recorder) -> None:
    sent = [
        publish(models, True, {"supplier_id": 1}),
        models.app.send_task(models.load.name, ({"supplier_id": 2},), expires=datetime.now(UTC) - timedelta(hours=1)),
        models.load_once.apply_async(({"supplier_id": 3},), countdown=0.5),
    ]
    for result in sent:
        result.get(timeout=PROMPTLY, propagate=False)

    makers = {int(pid) for pid in recorder._client.smembers("makers of models")}
    assert makers
    assert worker.pid not in makers
