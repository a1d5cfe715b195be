"""A plugin inside the pytest that plays Celery's tests: it writes down what comes of each, and brings in the lock."""

import json
import os
from pathlib import Path
from typing import Any

import celery
import pytest

from celery_singleton_lock import SingletonTask

OUTCOMES = Path(os.environ["CELERY_SUITE_OUTCOMES"])
IS_LOCKED = bool(os.environ.get("CELERY_SUITE_LOCKED"))
# With one process in the pool, as the tests would have it, no two runs ever meet.
POOL_PROCESSES = 4

if IS_LOCKED:
    # Two of Celery's tasks have bases of their own, made of this; `task_cls` does not reach them.
    celery.Task = SingletonTask


@pytest.fixture(scope="session")
def celery_parameters() -> dict[str, Any]:
    return {"task_cls": "celery_singleton_lock:SingletonTask"} if IS_LOCKED else {}


@pytest.fixture(scope="session")
def celery_worker_parameters() -> dict[str, Any]:
    return {"concurrency": POOL_PROCESSES}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A fixture that does well says nothing about the test.
    if report.when == "call" or report.outcome != "passed":
        told = {
            "test": report.nodeid.partition("/integration/")[2],
            "outcome": outcome(report),
            "why": report.longreprtext[-4000:] if report.failed else "",
        }
        with OUTCOMES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


def outcome(report: pytest.TestReport) -> str:
    """In one word or a few, such as "passed" or "failed in teardown"."""
    if hasattr(report, "wasxfail"):
        return "failed, as expected" if report.skipped else "passed, unexpectedly"
    return report.outcome if report.when == "call" or report.skipped else f"{report.outcome} in {report.when}"
