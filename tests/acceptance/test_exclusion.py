"""P1, one at a time: real workers, real load, and proof that the recorder would see an overlap."""

import os
import signal
import subprocess
import sys

import pytest

from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP
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


def publish(env: dict[str, str]) -> None:
    command, env = [sys.executable, "-c", PUBLISH], {**os.environ, **env}
    publishers = [subprocess.Popen(command, env=env) for _ in range(PUBLISHERS)]
    assert [publisher.wait(60) for publisher in publishers] == [0] * PUBLISHERS


def run_load(env: dict[str, str], recorder: Recorder) -> None:
    with workers(APP, env, 2) as pair:
        publish(env)
        until(lambda: len(recorder.events("leave")) >= PUBLISHERS * CALLS_EACH, "every call has run", timeout=60)
        # A warm shutdown: who was killed between its body and its release would leave its key.
        for worker in pair:
            worker.send(signal.SIGTERM)
        for worker in pair:
            worker.wait()


def test_a_hundred_calls_of_four_keys_run_and_never_two_of_a_key_at_once(recorder: Recorder, valkey: Server) -> None:
    run_load({}, recorder)

    events = recorder.events()
    entered = recorder.events("enter")
    assert overlaps(events) == []
    assert len({event.run for event in entered}) == len(entered) == PUBLISHERS * CALLS_EACH
    for key in range(KEYS):
        fences = [event.facts["fence"] for event in entered if event.key == str(key)]
        assert fences == sorted(set(fences))
    with valkey.client(database=2) as client:
        # The counts of all tasks are no lock.
        assert [key for key in client.scan_iter("*") if "{" in key] == []


@pytest.mark.prove
def test_the_same_load_without_the_lock_overlaps_so_the_recorder_can_see_it(recorder: Recorder) -> None:
    run_load({"TEST_SABOTAGE": "1"}, recorder)

    assert len(overlaps(recorder.events())) > 0


@pytest.mark.prove
@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_a_worker_of_one_process_locks_in_memory(recorder: Recorder, pool: str) -> None:
    with workers(APP, {"TEST_LOCKS": "memory://"}, pool=pool, concurrency=4):
        results = [tasks.rescheduled.delay("k", number, 0.3) for number in range(3)]
        assert [result.get(timeout=60) for result in results] == [0, 1, 2]

    assert overlaps(recorder.events()) == []
