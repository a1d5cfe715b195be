"""`lock_label`: what operators read beside a key; off by default, and it costs no call its run."""

import json
import os
import signal

import pytest

from tests.acceptance import label_app as tasks
from tests.acceptance.conftest import Operate
from tests.recorder import Recorder
from tests.waiting import SOON, until
from tests.workers import workers

APP = "tests.acceptance.label_app"


def test_operators_read_it_beside_the_key_and_one_that_cannot_be_filled_in_costs_a_line_and_no_run(
    operate: Operate, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    queued = tasks.queued.apply_async(("k", 8), queue="nobody")
    failing = tasks.failing, tasks.failing_in_the_queue
    with workers(APP, concurrency=3) as (worker,):
        tasks.labelled.delay("k", 7, seconds=60.0)
        tasks.unlabelled.delay("k", 7, seconds=60.0)
        until(lambda: len(recorder.events("enter")) == 2, "they run")
        rows = {(row["task_name"], row["state"]): row["label"] for row in json.loads(operate("list", "--json").stdout)}
        head, *lines = operate("list").stdout.splitlines()
        assert "lock.label_failed" not in worker.log()
        assert "supplier 7" not in worker.log()
        assert [task.delay("k", 7).get(timeout=SOON) for task in failing] == ["ran", "ran"]
        told = [line for line in worker.log().splitlines() if "lock.label_failed" in line]

    assert rows == {
        (tasks.labelled.name, "held"): "supplier 7",
        (tasks.unlabelled.name, "held"): None,
        (tasks.queued.name, "queued"): "supplier 8",
    }
    assert head.split()[:2] == ["LOCK", "LABEL"]
    assert sum("supplier" in line for line in lines) == 2
    assert queued.id in operate("list", "--wide").stdout
    # One whose call is queued is filled in by its publisher, too.
    told += [text for text in caplog.messages if text.startswith("lock.label_failed")]
    assert len(told) == 3
    for line, task in zip(told, (*failing, failing[1]), strict=True):
        about = (f"key={task.lock_key_for('k', 7)} task_id=", "AttributeError", "lock_label")
        assert all(word in line for word in about)
    assert "WARNING" in told[0]


@pytest.mark.prove
def test_the_log_has_it_where_one_says_so_and_names_what_has_died(recorder: Recorder) -> None:
    env = {"TEST_LOG_LABELS": "yes", "TEST_TTL": "8"}
    with workers(APP, env, concurrency=2) as (worker,):
        call = tasks.labelled.delay("k", 7, 60.0)
        (event,) = until(lambda: recorder.events("enter"), "it runs")
        duplicate = tasks.labelled.delay("k", 7, 60.0)
        until(lambda: f"task_id={duplicate.id} label='supplier 7' holder={call.id}" in worker.log(), "it is skipped")
        os.kill(event.pid, signal.SIGKILL)
        key = tasks.labelled.lock_key_for("k", 7, 60.0)
        told = f"lock.holder_died key={key} task_id={call.id} label='supplier 7' task={tasks.labelled.name} host="
        until(lambda: told in worker.log(), "it is told")
        lost = tasks.labelled.delay("k", 8, 60.0)
        until(lambda: len(recorder.events("enter")) == 2, "it runs")
        # With its host, so that nobody knows until the next one comes.
        worker.kill()
    with workers(APP, env) as (heir,):
        until(lambda: not tasks.labelled.lock_holders("k", 8, 60.0), "its lease is over")
        tasks.labelled.delay("k", 8, 60.0)
        died = f"task_id={lost.id} label='supplier 8' task={tasks.labelled.name} host="
        until(lambda: died in heir.log(), "the heir tells")
