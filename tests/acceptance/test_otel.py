"""A real worker's traces tell of conflicts, waits and losses, each on the span of its run."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Grant
from tests.recorder import Recorder
from tests.servers import missing
from tests.waiting import until
from tests.workers import workers

APP = "tests.acceptance.otel_app"
WAIT = "singleton_lock wait"
PROMPTLY = 60

if find_spec("opentelemetry") is None or find_spec("opentelemetry.instrumentation") is None:
    missing("OpenTelemetry's SDK and its instrumentation of Celery are not installed")


def spans_in(path: Path) -> dict[str, dict[str, Any]]:
    """By task id, and those that belong to no run by their name."""
    spans = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return {span["attributes"].get("messaging.message.id") or span["name"]: span for span in spans}


@pytest.mark.prove
def test_the_spans_of_a_worker(tasks: Any, env: dict[str, str], recorder: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "spans"
    waits, store = tasks.by_policy["wait"], store_of(tasks.app)
    other = Claim(waits.lock_key_for("k"), "token", 60.0)
    grant = store.acquire(other)
    assert isinstance(grant, Grant)
    with workers(APP, env | {"TEST_SPANS": str(path)}, 1, concurrency=2):
        holder = tasks.skipped.delay("k", 60.0)
        until(lambda: recorder.events("enter"), "it runs", timeout=PROMPTLY)
        skipped = tasks.skipped.delay("k")
        until(lambda: skipped.id in spans_in(path), "the conflict is traced", timeout=PROMPTLY)
        key = tasks.skipped.lock_key_for("k")
        store.break_lock(key, None, "alice", force=False)
        until(lambda: holder.id in spans_in(path), "the loss is traced", timeout=PROMPTLY)
        waiting = waits.delay("k")
        until(lambda: store.survey([other.key])[0].waiters == 1, "it waits", timeout=PROMPTLY)
        store.release(other, grant.place)
        until(lambda: {waiting.id, WAIT} <= {*spans_in(path)}, "all is traced", timeout=PROMPTLY)

    spans = spans_in(path)
    assert spans[skipped.id]["attributes"]["singleton_lock.holder.task_id"] == holder.id
    assert spans[skipped.id]["attributes"]["singleton_lock.outcome"] == "skipped"
    (loss,) = spans[holder.id]["events"]
    assert (loss["name"], loss["attributes"]["singleton_lock.reason"]) == ("singleton_lock.lost", "broken")
    assert spans[WAIT]["parent_id"] == spans[waiting.id]["context"]["span_id"]
