"""Events for monitors: a worker sends ours if, and while, it sends those of tasks."""

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP
from tests.monitor import Monitor
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

# For a worker on a busy machine.
PROMPTLY = 60
# As their routing keys, which are in the names of the channels.
OURS = "lock.conflict", "task.revoked"


def skip_some(number: int) -> None:
    results = [tasks.by_policy["skip"].delay("k") for _ in range(number)]
    for result in results:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=PROMPTLY)


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
        holder = tasks.by_policy["skip"].delay("k", gate="all are skipped")
        until(lambda: recorder.events("enter"), "it runs", timeout=PROMPTLY)
        assert tasks.app.control.ping(timeout=PROMPTLY, limit=1)
        before = of_the_broker(valkey)
        skip_some(40)
        assert monitor.about(*OURS) == []
        assert len(of_the_broker(valkey)) <= len(before)
        until(lambda: monitor.about("worker.heartbeat"), "its dispatcher sends something else", timeout=PROMPTLY)

        assert tasks.app.control.enable_events(reply=True, timeout=PROMPTLY, limit=1)
        skip_some(3)
        until(lambda: [len(monitor.about(each)) for each in OURS] == [3, 3], "they are sent", timeout=PROMPTLY)

        assert tasks.app.control.disable_events(reply=True, timeout=PROMPTLY, limit=1)
        skip_some(3)
        assert [len(monitor.about(each)) for each in OURS] == [3, 3]
        recorder.open_gate("all are skipped")
        holder.get(timeout=PROMPTLY)
