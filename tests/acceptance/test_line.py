"""Calls that wait in the broker: called in their order, and asking nobody meanwhile."""

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockHeld
from celery_singleton_lock.operations import breaking
from celery_singleton_lock.operations.rows import Locks, call_of, call_text
from tests.acceptance.conftest import APP
from tests.recorder import Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, workers

SOON = 40
"""Seconds in which a call that is called has come, on a machine that stands still for a while."""


def line_of(task: Any, key: str = "k") -> list[str]:
    return [turn.task_id for turn in task.lock_state(key).turns]


@contextmanager
def held(tasks: Any, recorder: Recorder, key: str = "k") -> Iterator[Any]:
    result = tasks.by_policy["reschedule"].delay(key, -1, gate=f"the end of {key}")
    until(lambda: [event for event in recorder.events("enter") if event.key == key], "the holder runs")
    try:
        yield result
    finally:
        recorder.open_gate(f"the end of {key}")


def in_line(task: Any, number: int, key: str = "k", **options: Any) -> list[Any]:
    before = len(line_of(task, key))
    results = [task.apply_async((key, n), **options) for n in range(number)]
    until(lambda: len(line_of(task, key)) == before + number, f"{number} more wait")
    return results


def heard_by(server: Server, number: int, key: str, timeout: float = SOON) -> None:
    with server.client(database=2) as client:
        until(lambda: len(client.pubsub_channels(f"{key}:@*")) == number, f"they listen for {number}", timeout=timeout)


@pytest.mark.parametrize(
    "pool", ["threads", *(pytest.param(p, marks=pytest.mark.prove) for p in ("solo", "gevent", "eventlet"))]
)
def test_a_burst_of_one_key_runs_one_at_a_time(tasks: Any, env: dict[str, str], recorder: Recorder, pool: str) -> None:
    task = tasks.by_policy["reschedule"]
    with workers(APP, env, 1, pool=pool, concurrency=4):
        first = task.delay("k", 0, 1.0)
        results = [first, *(task.delay("k", number, 0.01) for number in range(1, 30))]
        assert [result.get(timeout=3 * SOON) for result in results] == list(range(30))

    assert overlaps(recorder.events()) == []


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.prove)], indirect=True)
def test_two_workers_hand_one_key_over_in_order(
    tasks_by_broker: Any, env: dict[str, str], recorder: Recorder, valkey: Server, broker: str
) -> None:
    task = tasks_by_broker.by_policy["reschedule"]
    with workers(APP, {**env, "TEST_BROKER": broker}, 2, concurrency=2):
        with held(tasks_by_broker, recorder):
            results = in_line(task, 10)
            heard_by(valkey, 10, task.lock_key_for("k"))
            waits = line_of(task)
        assert [result.get(timeout=SOON) for result in results] == list(range(10))

    assert overlaps(recorder.events()) == []
    ran = [event.run for event in recorder.events("enter")][1:]
    # One that was called is passed over if the machine stands still for three seconds.
    places = [waits.index(each) for each in ran]
    assert sum(a > b for a, b in itertools.pairwise(places)) <= 2, places
    assert line_of(task) == []


def refused_in_the_pool(worker: Worker) -> list[str]:
    """The task ids of the runs of this worker that have met a holder."""
    return re.findall(r"PoolWorker-\d+\] lock\.conflict .*? task_id=(\S+)", worker.log())


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.prove)], indirect=True)
def test_a_burst_is_hardly_refused_in_the_pool_and_each_call_is_told_once(
    tasks_by_broker: Any, env: dict[str, str], recorder: Recorder, broker: str
) -> None:
    task = tasks_by_broker.by_policy["reschedule"]
    with workers(APP, {**env, "TEST_BROKER": broker}, 2, concurrency=2) as both:

        def told() -> int:
            return sum(each.log().count("outcome=rescheduled") for each in both)

        with held(tasks_by_broker, recorder):
            results = in_line(task, 60)
            until(lambda: told() >= 60, "all are told")
            # One in the worker that does not run the holder; a few if it stands still meanwhile.
            assert sum(len(refused_in_the_pool(each)) for each in both) <= 10
        assert [result.get(timeout=3 * SOON) for result in results] == list(range(60))
        assert told() == 60

    assert overlaps(recorder.events()) == []


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.prove)], indirect=True)
def test_a_burst_of_one_key_keeps_no_other_key_waiting(
    tasks_by_broker: Any, env: dict[str, str], recorder: Recorder, broker: str
) -> None:
    task = tasks_by_broker.by_policy["reschedule"]
    with (
        workers(APP, {**env, "TEST_BROKER": broker}, 1, concurrency=2),
        held(tasks_by_broker, recorder),
    ):
        for number in range(4):
            for _ in range(40):
                task.delay("k")
            # Each message that waits in the worker makes room for another one.
            assert task.delay(f"another {number}", number).get(timeout=SOON) == number


def test_a_message_that_is_no_new_call_is_refused_by_its_run(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    task = tasks.by_policy["reschedule"]
    with workers(APP, env, 1, concurrency=2) as (worker,), valkey.client() as broker:
        with held(tasks, recorder):
            new = task.delay("k", 0)
            until(lambda: worker.log().count(f"task_id={new.id}"), "it has its turn")
            due, retried = task.apply_async(("k", 1), countdown=0.5), task.apply_async(("k", 2), retries=1)
            redelivered = task.apply_async(("k", 3), queue="of nobody")
            message = json.loads(broker.lpop("of nobody"))
            message["headers"]["redelivered"] = True
            message["properties"]["delivery_info"] |= {"redelivered": True, "routing_key": "celery"}
            broker.lpush("celery", json.dumps(message))
            until(lambda: {due.id, retried.id} <= {*refused_in_the_pool(worker)}, "their runs are refused")
            until(lambda: redelivered.id in line_of(task), "a copy has its turn, too")
            assert not {new.id, redelivered.id} & {*refused_in_the_pool(worker)}
        assert [each.get(timeout=SOON) for each in (new, due, retried, redelivered)] == [0, 1, 2, 3]

    assert overlaps(recorder.events()) == []


def test_who_waits_occupies_no_process_and_asks_nobody(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    task = tasks.by_policy["reschedule"]
    with workers(APP, env, 1, concurrency=2) as (worker,), held(tasks, recorder):
        in_line(task, 20)
        heard_by(valkey, 20, task.lock_key_for("k"))
        asked = worker.log().count("] received")
        # Two seconds of a busy worker, in which each would have come at least once.
        for _ in range(20):
            assert task.delay("other", 0, 0.1).get(timeout=SOON) == 0
        # One that is called as the machine stands still asks once more.
        assert asked + 20 <= worker.log().count("] received") < asked + 30
        assert "position 1 in the line" in _what_became_of(tasks.app, line_of(task)[0])
        assert len(line_of(task)) == 20


def _what_became_of(app: Any, task_id: str) -> str:
    call, rows, _ = call_of(Locks(app), task_id)
    return call_text(call, rows)


def test_a_call_that_is_revoked_or_expires_or_has_waited_for_long_enough_leaves_the_line(
    tasks: Any, env: dict[str, str], recorder: Recorder
) -> None:
    task, impatient = tasks.by_policy["reschedule"], tasks.impatient
    with workers(APP, env, 1, concurrency=2):
        with held(tasks, recorder):
            (revoked,) = in_line(task, 1)
            (stamped,) = in_line(task, 1, headers={"stamped_headers": ["who"], "stamps": {"who": ["x"]}})
            (expired,) = in_line(task, 1, expires=4.0)
            tasks.app.control.revoke(revoked.id)
            with pytest.raises(TaskRevokedError):
                revoked.get(timeout=SOON)
            with pytest.raises(TaskRevokedError):
                expired.get(timeout=SOON)
            until(lambda: line_of(task) == [stamped.id], "they have no turn")
            tasks.app.control.revoke_by_stamped_headers({"who": ["x"]})
            with pytest.raises(TaskRevokedError):
                stamped.get(timeout=SOON)
            until(lambda: line_of(task) == [], "it has no turn")
            late = impatient.delay("k", 1)
            with pytest.raises(LockHeld):
                late.get(timeout=SOON)
            until(lambda: line_of(task) == [], "it has no turn")
        assert task.delay("k", 7).get(timeout=SOON) == 7


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_inspect_shows_the_calls_that_wait_and_none_that_has_run(
    tasks: Any, env: dict[str, str], recorder: Recorder, pool: str
) -> None:
    task = tasks.by_policy["reschedule"]

    def scheduled() -> set[str]:
        (entries,) = (tasks.app.control.inspect().scheduled() or {"nobody": []}).values()
        return {entry["request"]["id"] for entry in entries}

    with workers(APP, env, 1, pool=pool):
        with held(tasks, recorder):
            waiting = in_line(task, 3)
            until(lambda: scheduled() == {result.id for result in waiting}, "all of them are shown", timeout=SOON)
        assert [result.get(timeout=SOON) for result in waiting] == [0, 1, 2]
        assert scheduled() == set()


def test_a_worker_that_dies_with_a_hundred_turns_keeps_nobody_waiting(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    task = tasks.by_policy["reschedule"]
    with workers(APP, {**env, "TEST_TTL": "5"}, 1, concurrency=2) as (dies,), held(tasks, recorder):
        in_line(task, 100)
        heard_by(valkey, 100, task.lock_key_for("k"))
        # Its message does not come to the one that dies.
        with workers(APP, env, 1, "-Q", "other", concurrency=2):
            (lives,) = in_line(task, 1, queue="other")
            heard_by(valkey, 101, task.lock_key_for("k"))
            dies.kill()
            assert lives.get(timeout=SOON) == 0


def test_the_line_outlives_the_worker_that_held_its_messages(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    task = tasks.by_policy["reschedule"]
    with workers(APP, env, 2, concurrency=2) as both:
        with held(tasks, recorder):
            results = in_line(task, 6)
            heard_by(valkey, 6, task.lock_key_for("k"))
            order = line_of(task)
            # Celery takes a run whose result nobody reads any more for one that has died, and its call ends so.
            until(lambda: sorted(map(len, _active(task))) == [0, 1], "all results are read", SOON)
            (ends,) = [each for each in both if each.pid != os.getpgid(recorder.events("enter")[0].pid)]
            ends.send(signal.SIGTERM)
            ends.wait()
            # The broker delivers its messages to the other one.
            heard_by(valkey, 6, task.lock_key_for("k"))
            assert sorted(line_of(task)) == sorted(order)
        assert [result.get(timeout=SOON) for result in results] == list(range(6))
    assert overlaps(recorder.events()) == []


def _active(task: Any) -> list[Any]:
    return [*(task.app.control.inspect().active() or {}).values()]


def test_a_store_that_has_lost_all_loses_no_call(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    task = tasks.by_policy["reschedule"]
    with workers(APP, env, 1, concurrency=2):
        with held(tasks, recorder) as first:
            results = in_line(task, 5)
            heard_by(valkey, 5, task.lock_key_for("k"))
            with valkey.client(database=2) as client:
                client.flushdb()
            # The run that has lost its lock is aborted; those that wait find out by themselves.
            assert [result.get(timeout=2 * SOON) for result in results] == list(range(5))
        first.forget()


def test_a_lock_that_is_broken_is_handed_to_the_next(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    task = tasks.by_policy["reschedule"]
    with workers(APP, env, 1, concurrency=2), held(tasks, recorder):
        (waits,) = in_line(task, 1)
        locks = Locks(tasks.app)
        breaking.ask(locks, breaking.Plan.of(locks.survey(task.lock_key_for("k"))), "a test", force=True)
        assert waits.get(timeout=SOON) == 0


def test_a_limit_and_a_cool_down_are_a_rate(tasks: Any, env: dict[str, str], recorder: Recorder) -> None:
    task = tasks.one_in_a_second
    with workers(APP, env, 1, concurrency=3):
        for number in range(4):
            task.delay("k", number)
        until(lambda: len(recorder.events("enter")) == 4, "all have run", timeout=3 * SOON)

    moments = [event.at for event in recorder.events("enter")]
    gaps = [later - sooner for sooner, later in itertools.pairwise(moments)]
    assert min(gaps) > 0.95, gaps


@pytest.mark.prove
def test_who_may_not_subscribe_asks_by_itself_and_is_told_once(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server
) -> None:
    task = tasks.by_policy["reschedule"]
    with valkey.client() as client:
        client.execute_command("ACL SETUSER", "deaf", "on", "nopass", "~*", "+@all", "&*")
    try:
        url = valkey.url.replace("redis://", "redis://deaf:x@").removesuffix("/0") + "/2"
        with workers(APP, {**env, "TEST_LOCKS": url}, 2, concurrency=2) as both:
            with valkey.client() as client:
                # A worker does not start without this right.
                client.execute_command("ACL SETUSER", "deaf", "resetchannels")
            with held(tasks, recorder):
                results = [task.delay("k", number) for number in range(5)]
                until(lambda: any("lock.not_subscribed" in each.log() for each in both), "it is told")
            assert [result.get(timeout=3 * SOON) for result in results] == list(range(5))
            assert max(each.log().count("lock.not_subscribed") for each in both) == 1
    finally:
        with valkey.client() as client:
            client.acl_deluser("deaf")
    assert overlaps(recorder.events()) == []


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_the_next_run_is_called(
    tasks: Any, env: dict[str, str], recorder: Recorder, valkey: Server, policy: str
) -> None:
    task = tasks.by_policy[policy]
    with workers(APP, env, 1, concurrency=2):
        first = task.delay(
            "k", 0, gate="the end" if policy == "rerun" else None, seconds=0.0 if policy == "rerun" else 60.0
        )
        until(lambda: recorder.events("enter"), "it runs")
        older = task.delay("k", 1)
        if policy == "rerun":
            heard_by(valkey, 1, task.lock_key_for("k"))
            newer = task.delay("k", 2)
            with pytest.raises(TaskRevokedError, match=newer.id):
                older.get(timeout=SOON)
            recorder.open_gate("the end")
            assert newer.get(timeout=SOON) == 2
            assert first.get(timeout=SOON) == 0
        else:
            assert older.get(timeout=SOON) == 1
            with pytest.raises(TaskRevokedError, match=older.id):
                first.get(timeout=SOON)
