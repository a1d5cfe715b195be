"""`rerun` and `replace` in a queue mode: the newest call takes the place of the queued one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chord, group

from celery_singleton_lock import CallRevoked
from tests.acceptance import app as tasks
from tests.acceptance.app import PAIRS
from tests.acceptance.conftest import APP
from tests.recorder import Recorder, numbers, overlaps
from tests.waiting import SOON, until
from tests.workers import workers

LONGEST_WAIT = 4.0
LATE = 8.0

every_pair = pytest.mark.parametrize(
    "pair", [pair if pair == PAIRS[1] else pytest.param(pair, marks=pytest.mark.prove) for pair in PAIRS]
)


TASKS = tasks.newest_of


def ends_for(newest: Any, *older: Any) -> None:
    for number, each in enumerate(older):
        with pytest.raises(CallRevoked) as revoked:
            each.get(timeout=SOON)
        assert revoked.value.reason == "superseded"
        assert revoked.value.holder_task_id in [newer.id for newer in (*older[number + 1 :], newest)]


def test_of_calls_with_a_countdown_the_last_one_runs(recorder: Recorder) -> None:
    calls = {pair: [task.apply_async((pair, n), countdown=1) for n in range(4)] for pair, task in TASKS.items()}
    for pair, task in TASKS.items():
        assert len({each.id for each in calls[pair]}) == 4
        assert task.lock_state(pair).queued == calls[pair][-1].id
    with workers(APP, concurrency=3):
        for pair, task in TASKS.items():
            *older, newest = calls[pair]
            assert newest.get(timeout=SOON) == 3
            ends_for(newest, *older)
            assert task.delay(pair, 4).get(timeout=SOON) == 4
            assert numbers(recorder, pair) == [3, 4]


@contextmanager
def clock_ahead(seconds: float) -> Iterator[None]:
    own = time.time_ns
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: own() + round(seconds * 1e9))
        yield


clocks_that_differ = pytest.mark.parametrize("ahead", [2, pytest.param(40, marks=pytest.mark.prove)])


@clocks_that_differ
@pytest.mark.parametrize("policy", ["rerun", pytest.param("replace", marks=pytest.mark.prove)])
@pytest.mark.parametrize("sender", ["delay", "send_task"])
def test_the_last_published_is_next_by_any_clock(recorder: Recorder, policy: str, sender: str, ahead: float) -> None:
    task = tasks.by_policy[policy]
    with workers(APP, concurrency=4):
        # The one that is replaced never gets through its gate.
        holder = recorder.begun(task.delay("k", 0, gate="it ends"))
        with clock_ahead(ahead):
            first = task.delay("k", 1)
        if policy == "rerun":
            until(lambda: task.lock_state("k").next == first.id, "the first one is next")
        second = task.delay("k", 2) if sender == "delay" else tasks.app.send_task(task.name, ("k", 2))
        until(
            lambda: second.id in (task.lock_state("k").next, recorder.events("enter")[-1].run), "the second one is next"
        )
        recorder.open_gate("it ends")

        assert second.get(timeout=SOON) == 2
        ends_for(second, first)
        holder.get(timeout=SOON, propagate=False)
    assert numbers(recorder) == [0, 2]


@every_pair
def test_a_debounce_that_is_called_all_the_time_runs_within_its_longest_wait(recorder: Recorder, pair: str) -> None:
    task = tasks.debounced_of[pair]
    sent = list[float]()
    with workers(APP, concurrency=3):
        # Each call comes before the one before it is due, until two of them have run.
        while len(numbers(recorder)) < 2:
            assert len(sent) < 200, numbers(recorder)
            last = task.apply_async(("k", len(sent)), eta=datetime.now(UTC) + timedelta(seconds=3))
            sent.append(time.clock_gettime(time.CLOCK_BOOTTIME))
            time.sleep(0.4)
        assert last.get(timeout=SOON) == len(sent) - 1

    first, second = [event.at for event in recorder.events("enter")][:2]
    assert first - sent[0] < LONGEST_WAIT + LATE
    begun_again = next(at for at in sent if at > first)
    assert second - begun_again < LONGEST_WAIT + LATE
    for event in recorder.events("enter"):
        # A run has the arguments that were the newest a moment before, or newer ones.
        assert len([at for at in sent if at < event.at - LATE]) <= event.facts["number"] + 1
    assert overlaps(recorder.events()) == []


@pytest.mark.parametrize("pair", [PAIRS[1], pytest.param(PAIRS[2], marks=pytest.mark.prove)])
def test_of_calls_during_a_run_the_last_one_is_the_next_run(recorder: Recorder, pair: str) -> None:
    task = TASKS[pair]
    with workers(APP, concurrency=3):
        first = recorder.begun(task.delay("k", 0, gate="it ends"))
        *older, newest = [task.delay("k", number) for number in (1, 2, 3)]
        ends_for(newest, *older)
        if pair.startswith("rerun"):
            recorder.open_gate("it ends")
        assert newest.get(timeout=SOON) == 3
        if pair.startswith("replace"):
            with pytest.raises(CallRevoked, match=newest.id):
                first.get(timeout=SOON)
        else:
            assert first.get(timeout=SOON) == 0
        until(lambda: not task.lock_state("k").holders, "nobody holds the key")
    assert numbers(recorder) == [0, 3]
    assert overlaps(recorder.events()) == []


def test_if_the_newest_ends_without_a_run_the_one_before_it_runs(recorder: Recorder) -> None:
    with workers(APP, concurrency=1):
        recorder.begun(tasks.by_policy["skip"].delay("another", gate="the worker is free"))
        calls = [
            (task, key, task.delay(key, 1), task.apply_async((key, 2), expires=0.1 if key == "expired" else None))
            for task in TASKS.values()
            for key in ("expired", "revoked")
        ]
        revoked = [newest for _, key, _, newest in calls if key == "revoked"]
        for each in revoked:
            each.revoke()
        heard = tasks.app.control.inspect().revoked
        until(lambda: all(each.id in str(heard()) for each in revoked), "the worker has heard of it")
        for task, key, *_ in calls:
            until(lambda task=task, key=key: task.lock_state(key).queued is None, "it is queued no more")
        recorder.open_gate("the worker is free")

        for task, key, older, newest in calls:
            assert older.get(timeout=SOON) == 1
            until(lambda newest=newest: newest.state == "REVOKED", "the newest never runs")
            assert task.delay(key, 3).get(timeout=SOON) == 3


def test_a_canvas_ends_of_which_the_newest_member_runs(recorder: Recorder) -> None:
    task = TASKS[PAIRS[1]]
    members = [task.si("k", number) for number in range(3)]
    with workers(APP, concurrency=1):
        recorder.begun(tasks.by_policy["skip"].delay("another", gate="the worker is free"))
        grouped = group(members)()
        collected = chord(members)(tasks.collect.s())
        recorder.open_gate("the worker is free")

        assert collected.get(timeout=SOON) == [None, None, 2]
        until(grouped.ready, "it has ended", timeout=SOON)
    assert [each.state for each in grouped.results] == ["REVOKED"] * 3
    assert numbers(recorder) == [2]


def test_a_retry_neither_takes_the_place_of_a_queued_call_nor_gives_way_to_it(recorder: Recorder) -> None:
    task = tasks.newest_retried
    with workers(APP, concurrency=2):
        first = recorder.begun(task.delay("k", 1, fails=True, gate="it fails"))
        queued = task.apply_async(("k", 2), countdown=600)
        recorder.open_gate("it fails")

        with pytest.raises(ValueError, match="1"):
            first.get(timeout=SOON)
        assert task.lock_state("k").queued == queued.id
    assert numbers(recorder) == [1, 1]
