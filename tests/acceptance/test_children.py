"""Bodies that hold the GIL, so that no heartbeat runs in their processes: whose lease is kept, and whose is not."""

import os
import signal
import time

from tests.acceptance import children_app as children
from tests.recorder import Event, Recorder, of_key
from tests.waiting import until
from tests.workers import is_alive, workers

APP = "tests.acceptance.children_app"
PROMPTLY = 60


def test_the_main_process_keeps_the_lease_of_a_living_child_and_of_no_other(recorder: Recorder) -> None:
    tasks = {"lives": children.holds_the_gil, "dies": children.holds_the_gil, "stops": children.is_stopped}
    with workers(APP, concurrency=4):
        first = {key: task.delay(key, 600) for key, task in tasks.items()}
        run = {key: begun(recorder, key) for key in first}
        os.kill(run["stops"].pid, signal.SIGSTOP)
        second = {key: task.delay(key, 0) for key, task in tasks.items()}
        # Only the main process can renew: each body holds the GIL from its beginning.
        until(lambda: all(is_renewed(run[key]) for key in ("lives", "dies")), "both are renewed", timeout=PROMPTLY)

        os.kill(run["dies"].pid, signal.SIGKILL)
        for key in ("dies", "stops"):
            second[key].get(timeout=PROMPTLY)
        os.kill(run["stops"].pid, signal.SIGCONT)
        assert [event.run for event in of_key(recorder, "lives", "enter")] == [first["lives"].id]


def is_renewed(event: Event) -> bool:
    """Its lease lasts longer than that of its grant."""
    (holder,) = children.holds_the_gil.lock_holders(event.key, 0)
    assert holder.task_id == event.run
    since = time.clock_gettime(time.CLOCK_BOOTTIME) - event.at
    return bool(since + holder.expires_in > children.TTL + 2)


def test_a_child_that_is_to_be_killed_is_dead_before_the_next_run_begins(recorder: Recorder) -> None:
    with workers(APP, concurrency=2):
        children.is_killed.delay("k", 600)
        first = begun(recorder, "k")
        second = children.is_killed.delay("k", 0)
        until(lambda: second.id in [event.run for event in recorder.events("enter")], "the next runs", timeout=PROMPTLY)
        assert not is_alive(first.pid)


def begun(recorder: Recorder, key: str) -> Event:
    return until(lambda: of_key(recorder, key, "enter"), "it runs", timeout=PROMPTLY)[0]
