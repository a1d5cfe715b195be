"""The main process and its children: who is dead, who still runs, who may be killed."""

import time
from pathlib import Path

import pytest

from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim
from tests.endings.app import LONG, TASKS, app, killed
from tests.endings.conftest import APP, begun
from tests.recorder import Recorder
from tests.waiting import until
from tests.workers import is_alive, workers

pytestmark = pytest.mark.usefixtures("at_valkey")
TASK = TASKS[LONG, False]


# Only for a moment could it be seen that the key is free too early.
@pytest.mark.parametrize("turn", range(4))
def test_the_key_of_a_child_that_refuses_to_end_is_its_own_while_it_runs(recorder: Recorder, turn: int) -> None:
    with workers(APP) as (worker,):
        TASK.apply_async(("k", "refuse to end"), time_limit=1)
        pid = begun(recorder).pid
        # The child goes on for a while after its main process was told of the limit.
        until(lambda: "Hard time limit" in worker.log(), "the limit is reached")
        while is_alive(pid):
            held = bool(TASK.lock_holders("k", ""))
            assert held or not is_alive(pid)

        until(lambda: not TASK.lock_holders("k", ""), "the key is free", timeout=40)


def test_a_child_outlives_the_timer_of_its_last_task(recorder: Recorder) -> None:
    with workers(APP, concurrency=1):
        assert killed.delay("k", 0.1).get(timeout=40) == "ran"
        first = begun(recorder)
        # Longer than the ttl of the first, whose timer nobody renews.
        assert TASK.delay("k", "return").get(timeout=40) == "ran"
        until(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) > first.at + 3, "its deadline has passed")
        assert TASK.delay("other", "return").get(timeout=40) == "ran"
        # A run that did not get the lock at first leaves no timer either.
        store_of(app).acquire(Claim(killed.lock_key_for("held", 0), "holder", 2.0))
        assert killed.delay("held", 0).get(timeout=40) == "ran"
        until(lambda: timers(first.pid) == 0, "there is none")

    assert {event.pid for event in recorder.events("enter")} == {first.pid}


def timers(pid: int) -> int:
    return Path(f"/proc/{pid}/timers").read_text().count("notify:")
