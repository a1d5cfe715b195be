"""P3, nothing lost and nothing twice: messages that are delivered again, before and after their run has ended."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from celery import Task, chain

from tests.acceptance.conftest import APP
from tests.acceptance.step_app import first_step, next_step
from tests.gates import open_gate
from tests.proxy import Proxy
from tests.recorder import Event, Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

SOON = {"TEST_VISIBILITY": "3"}
GATE = "it ends"


@pytest.fixture
def impatient_broker(tasks: Any) -> Iterator[Any]:
    """Delivers again what was not acknowledged for three seconds."""
    options = dict(tasks.app.conf.broker_transport_options)
    tasks.app.conf.broker_transport_options = {**options, "visibility_timeout": 3}
    over = threading.Event()
    sweeper = threading.Thread(target=sweep, args=(tasks.app, over))
    sweeper.start()
    yield tasks
    over.set()
    sweeper.join()
    tasks.app.conf.broker_transport_options = options


def sweep(app: Any, over: threading.Event) -> None:
    """Do each second what a worker does each hundred seconds with a kombu before 5.7, which has no option for it."""
    with app.connection_for_read() as connection:
        while not over.wait(1):
            connection.default_channel.qos.restore_visible(interval=1)


def runs(recorder: Recorder) -> list[Event]:
    return recorder.events("enter")


def log_of(pair: list[Worker]) -> str:
    return "".join(worker.log() for worker in pair)


def test_a_run_longer_than_the_visibility_timeout_runs_once(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, {**env, **SOON}, 2) as pair:
        result = impatient_broker.late.delay("k", 1, gate=GATE)
        until(lambda: "outcome=parked" in log_of(pair), "a copy of it waits", timeout=30)
        open_gate(recorder, GATE)

        assert result.get(timeout=30) == 1
        until(lambda: "outcome=dropped" in log_of(pair), "the copy is dropped")
        until(lambda: broker_is_empty(env), "no message is left", timeout=30)

    assert len(runs(recorder)) == 1
    assert result.state == "SUCCESS"


@pytest.mark.prove
def test_a_copy_of_a_message_without_our_notes_is_dropped(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, {**env, **SOON}, 2) as pair:
        impatient_broker.app.send_task(impatient_broker.late.name, ("k", 1), {"gate": GATE})

        until(lambda: "outcome=parked" in log_of(pair), "a copy of it waits", timeout=30)
        open_gate(recorder, GATE)
        until(lambda: "outcome=dropped" in log_of(pair), "the copy is dropped")
        until(lambda: broker_is_empty(env), "no message is left", timeout=30)

    assert len(runs(recorder)) == 1


@pytest.mark.prove
def test_a_copy_of_a_run_that_was_handed_on_is_dropped(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, {**env, **SOON}, 2) as pair:
        result = impatient_broker.handing_on.delay("k", GATE)
        until(lambda: "outcome=parked" in log_of(pair), "a copy of it waits", timeout=30)
        open_gate(recorder, GATE)

        assert result.get(timeout=30) == ["after", "handed on"]
        until(lambda: "outcome=dropped" in log_of(pair), "the copy is dropped", timeout=30)

    assert len(runs(recorder)) == 1


@pytest.mark.prove
def test_a_message_that_waited_in_a_worker_while_its_copy_ran_is_dropped(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, {**env, **SOON}, concurrency=1) as (busy,):
        impatient_broker.by_policy["skip"].delay("its only slot", 0, gate=GATE)
        until(lambda: runs(recorder), "it is busy")
        result = impatient_broker.by_policy["skip"].delay("k", 1)
        until(lambda: f"[{result.id}] received" in busy.log(), "the message waits in the worker")

        with workers(APP, {**env, **SOON}, concurrency=1):
            assert result.get(timeout=30) == 1
            open_gate(recorder, GATE)
            until(lambda: "outcome=dropped" in busy.log(), "the first delivery is dropped", timeout=30)

    assert len([run for run in runs(recorder) if run.run == result.id]) == 1
    assert result.state == "SUCCESS"


@pytest.mark.prove
def test_a_call_that_a_killed_worker_had_not_begun_is_queued_until_it_is_delivered_again(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder
) -> None:
    task = impatient_broker.by_mode["until_executed"]
    with workers(APP, {**env, **SOON}, concurrency=1) as (busy,):
        impatient_broker.by_policy["skip"].delay("its only slot", 0, gate=GATE)
        until(lambda: runs(recorder), "it is busy")
        queued = task.delay("k", 1)
        until(lambda: f"[{queued.id}] received" in busy.log(), "the message waits in the worker")
        busy.kill()

    assert task.delay("k", 2).id == queued.id
    with workers(APP, {**env, **SOON}, concurrency=1):
        assert queued.get(timeout=60) == 1
        later = until(lambda: differs(task.delay("k", 3), queued.id), "an equal call is published again")
        assert later.get(timeout=60) == 3


def differs(result: Any, task_id: str) -> Any:
    return result if result.id != task_id else None


def test_a_copy_runs_where_the_first_run_has_died(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, {**env, **SOON}, 2) as pair:
        result = impatient_broker.late.delay("k", 1, gate=GATE)
        first = until(lambda: runs(recorder), "it runs")[0]
        # The first delivery, its copy, and the copy that was parked: a worker that is killed while it takes a message
        # from Redis loses it.
        until(lambda: log_of(pair).count(f"[{result.id}] received") >= 3, "a parked copy is kept", timeout=30)
        next(worker for worker in pair if worker.pid == os.getpgid(first.pid)).kill()
        open_gate(recorder, GATE)

        assert result.get(timeout=40) == 1

    assert len(runs(recorder)) == 2


@pytest.mark.prove
def test_a_message_with_a_far_eta_runs_once_on_three_workers(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, {**env, **SOON}, 3, concurrency=1):
        result = impatient_broker.by_policy["skip"].apply_async(("k", 1, 1), countdown=8)

        assert result.get(timeout=30) == 1
        until(lambda: broker_is_empty(env), "no message is left", timeout=30)

    assert len(runs(recorder)) == 1
    assert result.state == "SUCCESS"


@pytest.mark.prove
# A solo pool sees a lost connection once the body has ended, so there a late acknowledgement is lost.
@pytest.mark.parametrize(("pool", "late"), [("prefork", False), ("prefork", True), ("solo", False)])
def test_a_lost_connection_to_the_broker_costs_no_second_run(
    tasks_by_broker: Any, broker: str, env: dict[str, str], recorder: Recorder, late: bool, pool: str
) -> None:
    tasks = tasks_by_broker
    task = tasks.late if late else tasks.by_policy["skip"]
    with Proxy(port_of(broker)) as proxy:
        behind = broker.replace(str(port_of(broker)), str(proxy.port))
        with workers(APP, {**env, "TEST_BROKER": behind}, 1, pool=pool):
            result = task.delay("k", 1, 4)
            until(lambda: runs(recorder), "it runs")
            proxy.cut()

            assert result.get(timeout=30) == 1
            assert task.delay("other").get(timeout=30) == 0

    assert len([run for run in runs(recorder) if run.run == result.id]) == 1
    assert result.state == "SUCCESS"


@pytest.mark.parametrize("children", [1, 2])
def test_a_run_that_ends_while_the_broker_is_away_does_not_run_again(
    tasks: Any, rabbit: str, env: dict[str, str], recorder: Recorder, children: int
) -> None:
    tasks.app.conf.broker_url = rabbit
    tasks.app.control.purge()
    with Proxy(port_of(rabbit)) as proxy:
        behind = rabbit.replace(str(port_of(rabbit)), str(proxy.port))
        with workers(APP, {**env, "TEST_BROKER": behind}, 1, concurrency=children) as (worker,):
            result = tasks.late.delay("k", 1, 2)
            until(lambda: runs(recorder), "it runs")
            proxy.reset()
            assert result.get(timeout=10) == 1
            proxy.forward()

            until(lambda: "outcome=dropped" in worker.log(), "the copy is dropped", timeout=30)

    assert len(runs(recorder)) == 1
    assert result.state == "SUCCESS"


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_redis_delivers_after_the_end_is_dropped(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server, fails: bool
) -> None:
    # A run that takes most of the visibility timeout leaves word for a copy; a shorter one does not.
    with workers(APP, {**env, **SOON}, 1) as (worker,), valkey.client() as broker:
        result = tasks.late.delay("k", 1, 2.8, fails)
        until(lambda: runs(recorder), "it runs")
        (unacked,) = broker.hvals("unacked")
        result.get(timeout=10, propagate=False)
        # As kombu restores a message whose visibility timeout has passed before its acknowledgement came.
        message, _, queue = json.loads(unacked)
        message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
        broker.lpush(queue, json.dumps(message))

        until(lambda: "outcome=dropped" in worker.log(), "the copy is dropped")

    assert len(runs(recorder)) == 1
    assert result.state == ("FAILURE" if fails else "SUCCESS")


@pytest.mark.prove
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_of_copies_that_never_meet_one_runs(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server, pool: str
) -> None:
    result = tasks.by_policy["skip"].delay("k", 1)
    with valkey.client() as broker:
        message = json.loads(broker.lpop("celery"))
        # As kombu restores a message whose visibility timeout has passed twice.
        message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
        for number in range(2):
            message["properties"]["delivery_tag"] = f"tag {number}"
            broker.lpush("celery", json.dumps(message))
    with workers(APP, env, 1, pool=pool, concurrency=1) as (worker,):
        assert result.get(timeout=20) == 1
        until(lambda: "outcome=dropped" in worker.log(), "the other one is dropped", timeout=5)

    assert len(runs(recorder)) == 1
    assert result.state == "SUCCESS"


@pytest.mark.prove
@pytest.mark.parametrize(("pool", "countdown"), [("prefork", None), ("solo", 3)])
def test_a_message_that_a_busy_worker_has_kept_does_not_run_after_its_copy(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder, pool: str, countdown: float | None
) -> None:
    task = impatient_broker.by_policy["skip"]
    one_slot: Any = {"pool": pool, "concurrency": 1}
    with workers(APP, {**env, **SOON}, 1, **one_slot) as (busy,):
        if countdown is None:
            task.delay("another", 1, gate=GATE)
            until(lambda: runs(recorder), "another one runs")
        result = task.apply_async(("k", 1), countdown=countdown)
        until(lambda: f"{result.id}] received" in busy.log(), "its message is kept")
        if countdown is not None:
            task.delay("another", 1, gate=GATE)
        with workers(APP, {**env, **SOON}, 1, **one_slot):
            assert result.get(timeout=30) == 1
            open_gate(recorder, GATE)
            until(lambda: "outcome=dropped" in busy.log(), "the one that was kept is dropped", timeout=30)

    assert len([run for run in runs(recorder) if run.run == result.id]) == 1
    assert result.state == "SUCCESS"


@pytest.mark.prove
@pytest.mark.parametrize("late", [False, True])
def test_in_a_solo_pool_an_acknowledgement_does_not_wait_for_the_bodies_of_others(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder, late: bool
) -> None:
    task = impatient_broker.late if late else impatient_broker.by_policy["skip"]
    with workers(APP, {**env, **SOON}, 1, pool="solo") as (busy,):
        # Both are due in one round of the event loop, one after the other; it acknowledges in the next one.
        due = datetime.now(UTC) + timedelta(seconds=1.5)
        results = [
            task.apply_async((key, 1, seconds), eta=due + timedelta(microseconds=seconds))
            for key, seconds in (("k", 0), ("other", 12))
        ]
        until(lambda: busy.log().count("] received") == 2, "both messages are there")
        with workers(APP, {**env, **SOON}, 1, pool="solo"):
            assert [result.get(timeout=30) for result in results] == [1, 1]
            until(lambda: broker_is_empty(env), "no message is left", timeout=30)

    assert [run.key for run in runs(recorder)].count("k") == 1


@pytest.mark.prove
def test_a_message_rejected_for_a_lost_child_is_not_lost(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    with workers(APP, env, 2):
        result = tasks.late_and_rejecting.delay("k", 1, 3)
        os.kill(until(lambda: runs(recorder), "it runs")[0].pid, signal.SIGKILL)

        assert result.get(timeout=30) == 1

    assert len(runs(recorder)) == 2


@pytest.mark.prove
@pytest.mark.parametrize("has_a_copy", [False, True])
def test_a_chain_goes_on_after_a_child_that_died_before_it_sent_the_next_step(
    impatient_broker: Any, env: dict[str, str], recorder: Recorder, has_a_copy: bool
) -> None:
    with workers("tests.acceptance.step_app", {**env, **SOON}, 2) as pair:
        # Its result is ignored, so nothing but its marker says that the body has ended.
        chain(first_step.si("k", GATE), next_step.si()).apply_async()
        until(lambda: runs(recorder), "it runs")
        if has_a_copy:
            until(lambda: "outcome=parked" in log_of(pair), "a copy of it waits", timeout=30)
        open_gate(recorder, GATE)

        until(lambda: recorder.events("next"), "the next step runs", timeout=60)
        until(lambda: broker_is_empty(env), "no message is left", timeout=30)

    assert [len(runs(recorder)), len(recorder.events("next"))] == [2, 1]


def test_fifty_retries_at_once_lose_nothing(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    with workers(APP, env, 2):
        results = [tasks.retrying.delay(number, attempts=1, finish=0.1) for number in range(50)]
        assert [result.get(timeout=60) for result in results] == [1] * 50

    assert overlaps(recorder.events()) == []


@pytest.mark.prove
def test_automatic_retries_and_replacements_do_not_meet_themselves(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, env, 2):
        retried = [tasks.autoretrying.delay(f"a{number}") for number in range(10)]
        replaced = [tasks.replacing_itself.delay(f"r{number}", 2) for number in range(10)]

        assert [result.get(timeout=20) for result in retried] == [2] * 10
        assert [result.get(timeout=20) for result in replaced] == ["ran"] * 10

    assert overlaps(recorder.events()) == []
    assert len(runs(recorder)) == 60


@pytest.mark.prove
@pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="retry_on_worker_lost is new in Celery 5.7")
def test_the_retry_for_a_lost_child_waits_until_its_key_is_free(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    with workers(APP, env, 2):
        assert tasks.dying_at_first.delay("k").get(timeout=20) == 1

    assert len(runs(recorder)) == 2


def broker_is_empty(env: dict[str, str]) -> bool:
    with redis.Redis.from_url(env["TEST_STORE"]) as client:
        return not client.llen("celery") and not client.hlen("unacked")


def port_of(broker: str) -> int:
    return int(broker.split("127.0.0.1:")[1].split("/", maxsplit=1)[0])
