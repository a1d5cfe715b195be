"""Calls that wait in the broker of one worker: called in their order, and asking nobody meanwhile."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockHeld
from celery_singleton_lock.operations.rows import Locks, call_of, call_text
from tests.acceptance import app as tasks
from tests.acceptance.conftest import one_worker
from tests.recorder import Recorder, of_key, overlaps
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import Worker

TASK = tasks.by_policy["reschedule"]

valkey, worker = one_worker(3)


def line_of(key: str = "k") -> list[str]:
    return [turn.task_id for turn in TASK.lock_state(key).turns]


@contextmanager
def held(recorder: Recorder, key: str = "k") -> Iterator[Any]:
    result = recorder.begun(TASK.delay(key, -1, gate=f"the end of {key}"))
    try:
        yield result
    finally:
        recorder.open_gate(f"the end of {key}")


def in_line(number: int, key: str = "k", **options: Any) -> list[Any]:
    before = len(line_of(key))
    results = [TASK.apply_async((key, n), **options) for n in range(number)]
    until(lambda: len(line_of(key)) == before + number, f"{number} more wait")
    return results


def heard_by(server: Server, number: int, key: str = "k", timeout: float = SOON) -> None:
    channels = f"{TASK.lock_key_for(key)}:@*"
    with server.client(database=2) as client:
        until(lambda: len(client.pubsub_channels(channels)) == number, f"they listen for {number}", timeout=timeout)


def scheduled() -> set[str]:
    (entries,) = (tasks.app.control.inspect().scheduled() or {"nobody": []}).values()
    return {entry["request"]["id"] for entry in entries}


def refused_in_the_pool(worker: Worker) -> list[str]:
    return re.findall(r"PoolWorker-\d+\] lock\.conflict .*? task_id=(\S+)", worker.log())


def test_a_message_of_no_new_call_is_refused_by_its_run(worker: Worker, recorder: Recorder, valkey: Server) -> None:
    key = "no new call"
    with held(recorder, key), valkey.client() as broker:
        new = TASK.delay(key, 0)
        until(lambda: worker.log().count(f"task_id={new.id}"), "it has its turn")
        due, retried = TASK.apply_async((key, 1), countdown=0.5), TASK.apply_async((key, 2), retries=1)
        redelivered = TASK.apply_async((key, 3), queue="of nobody")
        message = json.loads(broker.lpop("of nobody"))
        message["headers"]["redelivered"] = True
        message["properties"]["delivery_info"] |= {"redelivered": True, "routing_key": "celery"}
        broker.lpush("celery", json.dumps(message))
        until(lambda: {due.id, retried.id} <= {*refused_in_the_pool(worker)}, "their runs are refused")
        until(lambda: redelivered.id in line_of(key), "a copy has its turn, too")
        assert not {new.id, redelivered.id} & {*refused_in_the_pool(worker)}
    assert [each.get(timeout=SOON) for each in (new, due, retried, redelivered)] == [0, 1, 2, 3]

    assert overlaps(of_key(recorder, key)) == []


def test_who_waits_occupies_no_process_asks_nobody_and_is_seen(
    worker: Worker, recorder: Recorder, valkey: Server
) -> None:
    key = "waits"
    with held(recorder, key):
        waiting = in_line(20, key)
        heard_by(valkey, 20, key)
        asked = worker.log().count("] received")
        # Two seconds of a busy worker, in which each would have come at least once.
        for _ in range(20):
            assert TASK.delay("other", 0, 0.1).get(timeout=SOON) == 0
        # One that is called as the machine stands still asks once more.
        assert asked + 20 <= worker.log().count("] received") < asked + 30
        call, rows, _ = call_of(Locks(tasks.app), line_of(key)[0])
        assert "position 1 in the line" in call_text(call, rows)
        assert len(line_of(key)) == 20
        until(lambda: scheduled() == {result.id for result in waiting}, "all of them are shown", timeout=SOON)
    assert [result.get(timeout=SOON) for result in waiting] == [*range(20)]
    assert scheduled() == set()


@pytest.mark.usefixtures("worker")
def test_a_call_that_is_revoked_or_expires_or_has_waited_for_long_enough_leaves_the_line(recorder: Recorder) -> None:
    key = "leaves"
    with held(recorder, key):
        (revoked,) = in_line(1, key)
        (expired,) = in_line(1, key, expires=4.0)
        tasks.app.control.revoke(revoked.id)
        for each in (revoked, expired):
            with pytest.raises(TaskRevokedError):
                each.get(timeout=SOON)
        until(lambda: line_of(key) == [], "they have no turn")
        with pytest.raises(LockHeld):
            tasks.impatient.delay(key, 1).get(timeout=SOON)
        until(lambda: line_of(key) == [], "it has no turn")
    assert TASK.delay(key, 7).get(timeout=SOON) == 7


@pytest.mark.usefixtures("worker")
def test_a_store_that_has_lost_all_loses_no_call(recorder: Recorder, valkey: Server) -> None:
    key = "lost"
    with held(recorder, key) as first:
        results = in_line(5, key)
        heard_by(valkey, 5, key)
        with valkey.client(database=2) as client:
            client.flushdb()
        # The run that has lost its lock is aborted; those that wait find out by themselves.
        assert [result.get(timeout=2 * SOON) for result in results] == list(range(5))
    first.forget()
