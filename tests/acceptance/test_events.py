"""Events for monitors: a worker sends ours if, and while, it sends those of tasks."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance.conftest import APP
from tests.gates import open_gate
from tests.monitor import Monitor
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

# Of a worker, on a machine that is busy.
PROMPTLY = 60
# As their routing keys, which are in the names of the channels.
OURS = "lock.conflict", "task.revoked"


def skip_some(tasks: Any, number: int) -> None:
    results = [tasks.by_policy["skip"].delay("k") for _ in range(number)]
    for result in results:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=PROMPTLY)


def of_the_broker(valkey: Server) -> set[int]:
    """The connections to the database that is the broker's, apart from this test's own."""
    with valkey.client() as client:
        own = client.client_id()
        return {int(each["id"]) for each in client.client_list() if each["db"] == "0" and int(each["id"]) != own}


def test_events_are_sent_if_and_while_the_worker_sends_those_of_tasks(
    tasks: Any, env: dict[str, str], valkey: Server, recorder: Recorder
) -> None:
    with (
        # Its dispatcher is enabled, for heartbeats.
        workers(APP, env, 1, concurrency=3, heartbeats=True),
        Monitor(valkey) as monitor,
    ):
        holder = tasks.by_policy["skip"].delay("k", gate="all are skipped")
        until(lambda: recorder.events("enter"), "it runs", timeout=PROMPTLY)
        assert tasks.app.control.ping(timeout=PROMPTLY, limit=1)
        before = of_the_broker(valkey)
        skip_some(tasks, 40)
        assert monitor.about(*OURS) == []
        assert len(of_the_broker(valkey)) <= len(before)
        until(lambda: monitor.about("worker.heartbeat"), "its dispatcher sends something else", timeout=PROMPTLY)

        assert tasks.app.control.enable_events(reply=True, timeout=PROMPTLY, limit=1)
        skip_some(tasks, 3)
        until(lambda: [len(monitor.about(each)) for each in OURS] == [3, 3], "they are sent", timeout=PROMPTLY)

        assert tasks.app.control.disable_events(reply=True, timeout=PROMPTLY, limit=1)
        skip_some(tasks, 3)
        assert [len(monitor.about(each)) for each in OURS] == [3, 3]
        open_gate(recorder, "all are skipped")
        holder.get(timeout=PROMPTLY)


@contextmanager
def heard_by_a_monitor(app: Any, valkey: Server) -> Iterator[list[dict[str, Any]]]:
    """The events of workers, as Flower hears them."""
    events: list[dict[str, Any]] = []
    with app.connection_for_read() as connection, valkey.client() as client:
        receiver = app.events.Receiver(connection, handlers={"*": events.append})
        before = client.pubsub_numpat()
        listens = Thread(target=receiver.capture, kwargs={"limit": None, "timeout": None, "wakeup": False})
        listens.start()
        until(lambda: client.pubsub_numpat() > before, "it listens", timeout=PROMPTLY)
        yield events
        receiver.should_stop = True
        listens.join(PROMPTLY)


def test_with_its_option_each_is_sent(tasks: Any, env: dict[str, str], valkey: Server, recorder: Recorder) -> None:
    task = tasks.by_policy["wait"]
    with workers(APP, env, 1, "-E", concurrency=3), heard_by_a_monitor(tasks.app, valkey) as events:
        holders = [each.delay("k", gate="all are here") for each in (task, tasks.by_policy["skip"])]
        until(lambda: len(recorder.events("enter")) == 2, "they run", timeout=PROMPTLY)
        skip_some(tasks, 1)
        waiting = task.delay("k")
        until(lambda: any(each["type"] == "lock-waiting" for each in events), "it waits", timeout=PROMPTLY)
        open_gate(recorder, "all are here")
        assert waiting.get(timeout=PROMPTLY) == 0
        until(lambda: any(each["type"] == "lock-acquired" for each in events), "it is granted", timeout=PROMPTLY)

    known = {each["type"]: each for each in events}
    conflict, waits, granted = (known[f"lock-{name}"] for name in ("conflict", "waiting", "acquired"))
    assert conflict["uuid"] == known["task-revoked"]["uuid"]
    assert (conflict["holder"], conflict["outcome"]) == (holders[1].id, "skipped")
    assert conflict["key"] == tasks.by_policy["skip"].lock_key_for("k")
    assert (waits["uuid"], waits["holder"]) == (waiting.id, holders[0].id)
    assert granted["uuid"] == waiting.id
    assert granted["waited"] > 0
