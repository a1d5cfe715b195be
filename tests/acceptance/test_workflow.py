"""`until_executed` with a body that replaces itself: one workflow at a time."""

from contextlib import suppress
from typing import Any

import pytest

from tests.acceptance import app as tasks
from tests.acceptance import workflow_app
from tests.acceptance.conftest import new_call
from tests.recorder import Recorder, overlaps
from tests.waiting import SOON, until
from tests.workers import workers

APP = "tests.acceptance.workflow_app"
POOLS = "threads", "solo", "gevent", "eventlet"
ON_PREFORK = "is killed", "time limit", "is terminated", "is revoked"
GATE = "it goes on"


def begun(recorder: Recorder, task: Any, kind: str, **options: Any) -> Any:
    before = len(recorder.events("enter"))
    first = task.apply_async(("k", kind, GATE), **options)
    waiting = 3 if kind == "failing last" else 2
    until(lambda: len(recorder.events("enter")) >= before + waiting, "a step runs", timeout=SOON)
    until(lambda: not task.lock_holders("k"), "the body has ended", timeout=SOON)
    return first


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("chain", "done"),
        *(pytest.param(kind, ["done", "done"], marks=pytest.mark.prove) for kind in ("group", "chord")),
        pytest.param("own key", "done", marks=pytest.mark.prove),
        pytest.param("own key last", "alone", marks=pytest.mark.prove),
    ],
)
def test_one_workflow_at_a_time(recorder: Recorder, kind: str, result: Any) -> None:
    task = workflow_app.workflow
    with workers(APP, concurrency=2):
        first = begun(recorder, task, kind)
        assert task.delay("k").id == first.id
        assert task.lock_state("k").queued == first.id
        recorder.open_gate(GATE)

        assert first.get(timeout=SOON) == result
        second = task.delay("k")
        assert second.id != first.id
        assert second.get(timeout=SOON) == "alone"


@pytest.mark.parametrize("pool", ["prefork", *(pytest.param(pool, marks=pytest.mark.prove) for pool in POOLS)])
def test_whatever_ends_a_workflow_ends_its_mark_though_nobody_looks(recorder: Recorder, pool: str) -> None:
    task = workflow_app.ending
    hows = [how for how in workflow_app.ENDINGS if pool == "prefork" or not how.endswith(ON_PREFORK)]
    control = tasks.app.control
    with workers(APP, pool=pool, concurrency=4), workflow_app.skipped.lock_for():
        calls = {how: task.delay(how).id for how in hows}
        until(lambda: len({each.run for each in recorder.events("held")}) == len(hows), "all are held", timeout=SOON)
        if pool == "prefork":
            control.revoke("revoked")
            until(lambda: "revoked" in str(control.inspect().revoked()), "the worker has heard of it", timeout=SOON)
        assert {how: task.lock_state(how).queued for how in hows} == calls
        recorder.open_gate("all are held")

        if pool == "prefork":
            until(lambda: "terminated" in {each.run for each in recorder.events("sleeps")}, "it runs", timeout=SOON)
            control.revoke("terminated", terminate=True)
        until_all_have_ended(task, hows)
        # The worker ends the marks of one step one after the other.
        until(lambda: not workflow_app.inner.lock_state("inner").queued, "the inner one has ended", timeout=SOON)


def until_all_have_ended(task: Any, hows: list[str]) -> None:
    queued = set(hows)

    def none_is_queued() -> bool:
        nonlocal queued
        queued = {how for how in queued if task.lock_state(how).queued}
        return not queued

    with suppress(AssertionError):
        until(none_is_queued, "all have ended", timeout=SOON)
    assert queued == set()


@pytest.mark.usefixtures("broker")
def test_a_result_that_is_forgotten_at_once_ends_no_less(recorder: Recorder) -> None:
    task = workflow_app.workflow
    recorder.open_gate(GATE)
    with workers(APP, concurrency=2):
        seen = set()
        for _ in range(5):
            first = task.delay("k", "chain", GATE)
            assert first.get(timeout=SOON) == "done"
            first.forget()
            failing = task.delay("k", "failing chain", GATE)
            with pytest.raises(ValueError, match="a step"):
                failing.get(timeout=SOON)
            failing.forget()
            seen |= {first.id, failing.id}
        assert len(seen) == 10


@pytest.mark.parametrize(
    "kind",
    [
        "chain",
        "failing chain",
        *(pytest.param(kind, marks=pytest.mark.prove) for kind in ("failing last", "group", "chord", "failing chord")),
    ],
)
def test_a_body_that_outlives_its_workflow_keeps_its_key_and_nobody_from_publishing(
    recorder: Recorder, kind: str
) -> None:
    task = workflow_app.workflow
    recorder.open_gate(GATE)
    with workers(APP, concurrency=3):
        first = task.delay("k", kind, GATE, "its body ends")
        first.get(timeout=SOON, propagate=False)
        first.forget()
        assert [each.task_id for each in task.lock_holders("k")] == [first.id]

        second = task.delay("k")
        assert second.id != first.id
        assert task.delay("k").id == second.id
        until(lambda: second.state == "RETRY", "it waits", timeout=SOON)
        recorder.open_gate("its body ends")
        assert second.get(timeout=SOON) == "alone"
    assert overlaps([event for event in recorder.events() if event.key == "begin"]) == []


@pytest.mark.prove
@pytest.mark.parametrize("how", ["by its result", "by its id"])
def test_a_workflow_that_is_revoked_counts_no_more(recorder: Recorder, how: str) -> None:
    task = workflow_app.workflow
    with workers(APP, concurrency=2):
        first = begun(recorder, task, "chain")
        if how == "by its result":
            first.revoke()
        else:
            tasks.app.control.revoke(first.id)
            until(lambda: first.id in str(tasks.app.control.inspect().revoked()), "the worker has heard of it")
            recorder.open_gate(GATE)

        second = new_call(task, "k", but=[first])
        assert second.get(timeout=SOON) == "alone"


def test_a_workflow_whose_last_step_never_comes_counts_for_lock_queue_ttl(recorder: Recorder) -> None:
    task = workflow_app.short_lived
    with workers(APP, concurrency=2):
        first = task.delay("k", "lost")
        until(lambda: len(recorder.events("enter")) == 2, "a step runs", timeout=SOON)

        second = new_call(task, "k", but=[first])
        assert second.get(timeout=SOON) == "alone"
    assert first.state == "PENDING"


def test_a_call_that_is_sent_all_the_same_comes_again_until_the_workflow_has_ended(recorder: Recorder) -> None:
    task = workflow_app.rescheduled
    with workers(APP, concurrency=3):
        first = begun(recorder, task, "chain")
        second = tasks.app.send_task(task.name, ("k",))
        until(lambda: second.state == "RETRY", "it is requeued", timeout=SOON)
        recorder.open_gate(GATE)

        assert first.get(timeout=SOON) == "done"
        assert second.get(timeout=SOON) == "alone"
    assert [event.run for event in recorder.events("leave") if event.key == "begin"] == [first.id, second.id]


def test_an_agent_that_has_patched_the_result_backend_still_sees_each_end() -> None:
    task = workflow_app.workflow
    with workers(APP, {"TEST_AGENT": "1"}) as (worker,):
        first = task.delay("k")
        assert first.get(timeout=SOON) == "alone"
        until(lambda: f"the agent has seen the end of {first.id}" in worker.log(), "it has seen it", timeout=SOON)
