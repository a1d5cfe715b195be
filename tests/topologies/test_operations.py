"""What operators see of a real worker's lock, and how they free it, on each topology."""

import json
from contextlib import ExitStack
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock.web import application
from tests.acceptance.conftest import operated
from tests.acceptance.test_doctor import Diagnosis
from tests.browsing import Visitor
from tests.recorder import Recorder
from tests.servers import SERVERS, Server, running
from tests.waiting import until
from tests.workers import workers

APP = "tests.topologies.app"
TTL = 6
PATIENCE = 60


@pytest.fixture(params=[*SERVERS, "sentinel", "cluster"])
def url(request: pytest.FixtureRequest, cleanup: ExitStack) -> str:
    if request.param == "cluster":
        return str(request.getfixturevalue("cluster").url)
    if request.param == "sentinel":
        deployment = request.getfixturevalue("calm")
        with deployment.master.client() as client:
            client.flushall()
        return str(deployment.url)
    return cleanup.enter_context(running(request.param)).url


@pytest.fixture
def environment(valkey: Server, url: str) -> dict[str, str]:
    base = valkey.url.removesuffix("/0")
    return {"TEST_BROKER": f"{base}/0", "TEST_RECORD": f"{base}/3", "TEST_LOCKS": url, "TEST_TTL": str(TTL)}


def test_a_lock_is_seen_shown_and_broken(
    tasks: Any,
    recorder: Recorder,
    cleanup: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "ops-1")
    key = tasks.import_catalogue.lock_key_for(7)

    def operate(*arguments: str) -> str:
        return str(operated(tasks.app)(*arguments).stdout)

    with workers(APP):
        holder = tasks.import_catalogue.delay(7)
        until(lambda: recorder.events("enter"), "it runs")

        (row,) = json.loads(operate("list", "--json"))
        assert (row["key"], row["state"], row["task_id"]) == (key, "held", holder.id)
        for question in ([key], [tasks.import_catalogue.name, "-a", "[7]"], [holder.id]):
            assert holder.id in operate("show", *question)
        assert key in Visitor(application(tasks.app)).get().body
        diagnosis = Diagnosis(operate("doctor", "--json", "--timeout", "10"), 0)
        assert (diagnosis.wrong, diagnosis.unseen) == ([], [])
        assert diagnosis.of("holders")[1] == "1 alive"

        broken = json.loads(operate("break", key, "--yes", "--json"))

        assert broken["seconds"] <= TTL + 1
        assert (broken["asked"], broken["gone"]) == ([holder.id], True)
        with pytest.raises(TaskRevokedError, match="broken by alice@ops-1"):
            holder.get(timeout=PATIENCE)
        assert json.loads(operate("list", "--json")) == []
