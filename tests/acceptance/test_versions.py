"""A worker meets messages and facts of a later version, and headers that no version writes."""

import time
from typing import Any

import pytest

from celery_singleton_lock import ConfigurationError
from tests.acceptance import app as tasks
from tests.acceptance.conftest import one_worker
from tests.recorder import Recorder, of_key
from tests.waiting import until
from tests.workers import Worker

PROMPTLY = 40
HEADER = "singleton_lock"
LATER = {"tenant": {"name": "north", "zones": [1, None]}, "weight": 0}

valkey, worker = one_worker(3)


def of_a_later_version(**notes: Any) -> dict[str, Any]:
    # Later than the holder, whose publisher went by the store's clock as it is known here.
    return {HEADER: {"published": time.time_ns() // 1000 + 10_000_000, **LATER, **notes}}


def later_notes(event: Any) -> dict[str, Any]:
    return {name: value for name, value in event.facts["notes"].items() if name in LATER}


@pytest.mark.parametrize("policy", ["reschedule", "rerun", "replace"])
def test_a_message_of_a_later_version_is_refused_and_runs_with_all_its_notes(
    worker: Worker, recorder: Recorder, policy: str
) -> None:
    task, key = tasks.by_policy[policy], f"later-{policy}"
    task.delay(key, 0, gate=key)
    until(lambda: of_key(recorder, key, "enter"), "the holder runs")
    result = tasks.app.send_task(task.name, (key, 1), headers=of_a_later_version())
    until(lambda: f"task_id={result.id}" in worker.log(), "it is refused")
    recorder.open_gate(key)

    assert result.get(timeout=PROMPTLY) == 1
    assert later_notes(of_key(recorder, key, "enter")[-1]) == LATER


def test_a_retry_keeps_the_notes_of_a_later_version(worker: Worker, recorder: Recorder) -> None:
    task, key = tasks.rerun_and_retried, "later-retried"
    result = tasks.app.send_task(task.name, (key, 1), {"countdown": 0}, headers=of_a_later_version())

    assert result.get(timeout=PROMPTLY) == 1
    assert [later_notes(event) for event in of_key(recorder, key, "enter")] == [LATER, LATER]


@pytest.mark.parametrize(
    "header",
    [
        "mine",
        True,
        1.5,
        ["k"],
        [{"key": "k"}],
        {"key": None},
        {"key": {"deep": [1]}},
        {"tries": True, **LATER},
        {"origin": ["k", 1]},
    ],
    ids=str,
)
def test_a_header_that_no_version_writes_fails_its_own_call_alone(worker: Worker, header: Any) -> None:
    task, key = tasks.by_policy["reschedule"], f"strange-{header}"

    with pytest.raises(ConfigurationError, match="give a header of your own another name"):
        tasks.app.send_task(task.name, (key,), headers={HEADER: header}).get(timeout=PROMPTLY)
    assert task.delay(key, 1).get(timeout=PROMPTLY) == 1
