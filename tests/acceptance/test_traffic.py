"""What runs cost: two commands to the store and no key, and no event unless the worker sends those of tasks."""

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance import app as tasks
from tests.acceptance import combined_app as combined
from tests.acceptance.conftest import APP
from tests.monitor import Monitor
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import workers

# As their routing keys, which are in the names of the channels.
OURS = "lock.conflict", "task.revoked"
LOCKS = 2


def skip_some(number: int) -> None:
    results = [tasks.by_policy["skip"].delay("k") for _ in range(number)]
    for result in results:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=SOON)


def of_the_broker(valkey: Server) -> set[int]:
    """The connections to the database that is the broker's, apart from this test's own."""
    with valkey.client() as client:
        own = client.client_id()
        return {int(each["id"]) for each in client.client_list() if each["db"] == "0" and int(each["id"]) != own}


def test_events_are_sent_if_and_while_the_worker_sends_those_of_tasks(valkey: Server, recorder: Recorder) -> None:
    with (
        # Its dispatcher is enabled, for heartbeats.
        workers(APP, concurrency=3, heartbeats=True),
        Monitor(valkey) as monitor,
    ):
        holder = recorder.begun(tasks.by_policy["skip"].delay("k", gate="all are skipped"))
        assert tasks.app.control.ping(timeout=SOON, limit=1)
        before = of_the_broker(valkey)
        skip_some(40)
        assert monitor.about(*OURS) == []
        assert len(of_the_broker(valkey)) <= len(before)
        until(lambda: monitor.about("worker.heartbeat"), "its dispatcher sends something else", timeout=SOON)

        assert tasks.app.control.enable_events(reply=True, timeout=SOON, limit=1)
        skip_some(3)
        until(lambda: [len(monitor.about(each)) for each in OURS] == [3, 3], "they are sent", timeout=SOON)

        assert tasks.app.control.disable_events(reply=True, timeout=SOON, limit=1)
        skip_some(3)
        assert [len(monitor.about(each)) for each in OURS] == [3, 3]
        recorder.open_gate("all are skipped")
        holder.get(timeout=SOON)


def test_a_run_that_met_no_copy_costs_two_commands_and_leaves_no_key(valkey: Server) -> None:
    late, early = combined.late, combined.by_policy["skip"]
    # A long ttl: a machine that pauses causes no renewal.
    with workers(combined.__name__, {"TEST_TTL": "60"}, concurrency=1):
        # The first one brings the scripts.
        assert early.delay("warm", 1).get(timeout=SOON) == 1
        with Monitor(valkey, LOCKS) as overheard:
            results = {task: task.delay("k", 2) for task in (late, early)}
            assert [result.get(timeout=SOON) for result in results.values()] == [2, 2]
            # The only child has done with them when it begins the other.
            assert early.delay("end", 3).get(timeout=SOON) == 3
            until(lambda: overheard.about(early.lock_key_for("end")), "all of it is heard")

    assert [len(overheard.about(task.lock_key_for("k"), each.id)) for task, each in results.items()] == [2, 2]
    with valkey.client(LOCKS) as locks:
        kept = [key for key in locks.scan_iter("*") if "{" in key or locks.type(key) != "hash"]
    assert kept == []
