"""P1, one at a time: real workers, real load, and proof that the recorder would see an overlap."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import APP
from tests.gates import open_gate
from tests.recorder import Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

KEYS = 4
PUBLISHERS = 2
CALLS_EACH = 50

PUBLISH = f"""
from {APP} import rescheduled
for number in range({CALLS_EACH}):
    rescheduled.delay(number % {KEYS}, number)
"""


def publish() -> None:
    publishers = [subprocess.Popen([sys.executable, "-c", PUBLISH]) for _ in range(PUBLISHERS)]
    assert [publisher.wait(60) for publisher in publishers] == [0] * PUBLISHERS


def run_load(env: dict[str, str], recorder: Recorder) -> None:
    with workers(APP, env, 2) as pair:
        publish()
        until(lambda: len(recorder.events("leave")) >= PUBLISHERS * CALLS_EACH, "every call has run", timeout=60)
        # A warm shutdown: who was killed between its body and its release would leave its key.
        for worker in pair:
            worker.send(signal.SIGTERM)
        for worker in pair:
            worker.wait()


def test_a_hundred_calls_over_four_keys_all_run_and_never_two_of_a_key_at_once(
    recorder: Recorder, valkey: Server
) -> None:
    run_load({}, recorder)

    events = recorder.events()
    entered = recorder.events("enter")
    assert overlaps(events) == []
    assert len({event.run for event in entered}) == len(entered) == PUBLISHERS * CALLS_EACH
    for key in range(KEYS):
        fences = [event.facts["fence"] for event in entered if event.key == str(key)]
        assert fences == sorted(set(fences))
    assert keys_of_locks(valkey) == []


@pytest.mark.prove
def test_the_same_load_without_the_lock_overlaps_so_the_recorder_can_see_it(recorder: Recorder) -> None:
    run_load({"TEST_SABOTAGE": "1"}, recorder)

    assert len(overlaps(recorder.events())) > 0


def test_two_tasks_of_one_lock_name_exclude_one_another(recorder: Recorder) -> None:
    with workers(APP):
        results = [task.delay("k", 0.2) for _ in range(3) for task in (tasks.one_of_two, tasks.shares_the_name)]
        assert [result.get(timeout=30) for result in results] == ["ran"] * 6

    assert overlaps(recorder.events()) == []


def test_lock_for_keeps_all_runs_of_a_task_with_several_places_out(recorder: Recorder) -> None:
    task = combined.two_places["reschedule"]
    with workers(combined.__name__, {}, 1, concurrency=4), ThreadPoolExecutor(1) as thread:
        first = [task.delay("k", number, gate=f"gate-{number}") for number in range(2)]
        until(lambda: len(recorder.events("enter")) == 2, "two run")
        lease = thread.submit(task.lock_for("k").acquire, timeout=60)
        until(lambda: task.lock_state("k").waiting == 1, "it waits")
        open_gate(recorder, "gate-0")
        assert first[0].get(timeout=30) == 0
        later = [task.delay("k", number) for number in range(2, 5)]
        until(lambda: task.lock_state("k").waiting == 4, "they wait though a place is free", timeout=30)
        open_gate(recorder, "gate-1")

        held = lease.result(60)
        with recorder.body("k", "lock_for"):
            later.append(task.delay("k", 5))
            until(lambda: task.lock_state("k").waiting == 4, "the last waits as well", timeout=30)
        held.release()

        assert [result.get(timeout=30) for result in later] == [2, 3, 4, 5]
    assert [pair for pair in overlaps(recorder.events()) if "lock_for" in (pair[0].run, pair[1].run)] == []


def keys_of_locks(server: Server) -> list[str]:
    with server.client(database=2) as client:
        # The counts of all tasks are no lock.
        return [key for key in client.scan_iter("*") if "{" in key]
