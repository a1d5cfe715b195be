"""Bodies that hold the GIL, so that no heartbeat runs in their processes: whose lease is kept, and whose is not."""

import os
import signal
import time

from tests.acceptance import children_app as children
from tests.recorder import Event, Recorder, of_key, overlaps
from tests.waiting import until
from tests.workers import is_alive, workers

APP = "tests.acceptance.children_app"
PROMPTLY = 60
TTL = 8.0


def test_the_main_process_keeps_the_lease_of_a_living_child_and_of_no_other(recorder: Recorder) -> None:
    task = children.holds_the_gil
    with workers(APP, concurrency=7):
        first = {key: task.delay(key, 2 * TTL + 2) for key in ("lives", "dies", "stops")}
        run = {key: begun(recorder, key) for key in first}
        second = {key: task.delay(key, 0) for key in first}
        until(lambda: all(since(each) > TTL + 1 for each in run.values()), "a ttl is over")
        assert {key: [each.task_id for each in task.lock_holders(key, 0)] for key in first} == {
            key: [each.id] for key, each in first.items()
        }

        os.kill(run["dies"].pid, signal.SIGKILL)
        os.kill(run["stops"].pid, signal.SIGSTOP)
        for key in ("dies", "stops"):
            second[key].get(timeout=PROMPTLY)
        os.kill(run["stops"].pid, signal.SIGCONT)
        for each in (first["lives"], second["lives"]):
            each.get(timeout=PROMPTLY)

    assert overlaps(of_key(recorder, "lives")) == []


def test_a_child_that_is_to_be_killed_is_dead_before_the_next_run_begins(recorder: Recorder) -> None:
    with workers(APP, concurrency=2):
        children.is_killed.delay("k", 600)
        first = begun(recorder, "k")
        second = children.is_killed.delay("k", 0)
        until(lambda: second.id in [event.run for event in recorder.events("enter")], "the next runs", timeout=PROMPTLY)
        assert not is_alive(first.pid)


def begun(recorder: Recorder, key: str) -> Event:
    return until(lambda: of_key(recorder, key, "enter"), "it runs", timeout=PROMPTLY)[0]


def since(event: Event) -> float:
    """Seconds on the clock of the record."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - event.at
