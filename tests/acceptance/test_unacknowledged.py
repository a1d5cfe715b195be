"""A delivery whose acknowledgement fails, on real workers."""

from typing import Any

import pytest
from celery import uuid

from tests.acceptance.redelivery import VISIBILITY, impatient
from tests.acceptance.unacknowledged_app import coming_again, has_lost_it, lose_an_acknowledgement
from tests.gates import open_gate
from tests.recorder import Recorder
from tests.waiting import until
from tests.workers import workers

pytestmark = pytest.mark.prove

APP = "tests.acceptance.unacknowledged_app"


@pytest.fixture
def env(env: dict[str, str]) -> dict[str, str]:
    return {**env, "C_FORCE_ROOT": "1"}


every_pool = pytest.mark.parametrize("pool", ["prefork", "threads"])


@every_pool
def test_a_call_that_was_refused_runs_although_that_was_not_acknowledged(
    tasks: Any, env: dict[str, str], recorder: Recorder, pool: str
) -> None:
    refused = uuid()
    lose_an_acknowledgement(recorder, refused)
    with workers(APP, env, 1, pool=pool):
        holder = coming_again.delay("k", 1, gate="the holder")
        until(lambda: recorder.events("enter"), "it runs")
        # With a countdown, so that each of its deliveries looks for what an earlier one has left.
        result = coming_again.apply_async(("k", 2), task_id=refused, countdown=0.1)
        until(lambda: has_lost_it(recorder, refused), "it was refused")
        open_gate(recorder, "the holder")

        assert result.get(timeout=20) == 2
        assert holder.get(timeout=5) == 1


@every_pool
def test_a_run_that_was_not_acknowledged_leaves_word_for_its_next_delivery(
    tasks: Any, env: dict[str, str], recorder: Recorder, pool: str
) -> None:
    run = uuid()
    lose_an_acknowledgement(recorder, run)
    late = {**env, "TEST_VISIBILITY": str(VISIBILITY)}
    with workers(APP, late, 1, pool=pool) as (worker,), impatient(coming_again.app):
        result = coming_again.apply_async(("k", 1), task_id=run)

        assert result.get(timeout=20) == 1
        until(lambda: "outcome=dropped" in worker.log(), "its next delivery is dropped", timeout=30)

    assert len(recorder.events("enter")) == 1
