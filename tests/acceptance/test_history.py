"""The history names calls that did not run, leases that were lost and holders that died."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.stores.records import Claim, Facts
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.web import application
from tests.acceptance import app as tasks
from tests.acceptance.conftest import APP, Operate, operated
from tests.browsing import Visitor
from tests.recorder import Recorder
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

# For a worker on a busy machine.
PROMPTLY = 60
EVIL = "\x1b[31m<b>7</b>"


@pytest.fixture
def app(valkey: Server) -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    # Other tests of this process may still have counts for the other databases.
    app.conf.singleton_lock_url = valkey.url.removesuffix("/0") + "/7"

    def catalogue(supplier: str, password: str) -> None: ...

    options = {"lock_key": ("supplier",), "lock_label": "supplier {supplier}", "shared": False}
    app.task(base=SingletonTask, name="shop.catalogue", **options)(catalogue)
    app.task(base=SingletonTask, name="shop.queued", lock_mode="until_executed", **options)(catalogue)
    yield app
    store_of(app).close()
    app.close()


def history(app: Celery, *arguments: str) -> list[dict[str, Any]]:
    counters.flush()
    told: list[dict[str, Any]] = json.loads(operated(app)("history", "--json", *arguments).stdout)
    return told


def skip(app: Celery, task_id: str = "", supplier: str = "7") -> None:
    task = app.tasks["shop.catalogue"]
    held = Claim(task.lock_key_for(supplier, ""), "token-a", 60.0, facts=Facts("the-holder", hostname="w1@web", pid=7))
    store_of(app).acquire(held)
    with pytest.raises(TaskRevokedError):
        task.apply((supplier, "secret"), task_id=task_id or None).get()


def test_a_call_that_was_skipped_is_found_by_time_key_and_holder(app: Celery) -> None:
    skip(app, "the-call")

    (event,) = history(app)

    assert event.pop("at")[:4].isdigit()
    assert event.pop("hostname")
    assert event == {
        "event": "conflict",
        "outcome": "skipped",
        "key": app.tasks["shop.catalogue"].lock_key_for("7", ""),
        "task_name": "shop.catalogue",
        "task_id": "the-call",
        "label": "supplier 7",
        "holder_task_id": "the-holder",
        "pid": os.getpid(),
    }
    kept = str(store_of(app).fields("singleton:v3:history"))
    assert "the-call" in kept
    assert "secret" not in kept
    assert "token-a" not in kept
    queued = app.tasks["shop.queued"].apply_async(("7", ""))
    app.tasks["shop.queued"].apply_async(("7", ""))
    unsent, _ = history(app)
    assert (unsent["event"], unsent["outcome"], unsent["task_id"]) == ("conflict", "unpublished", None)
    assert (unsent["holder_task_id"], unsent["label"]) == (queued.id, "supplier 7")


def test_people_read_the_newest_first_and_of_one_lock(app: Celery) -> None:
    skip(app, "the-first")
    skip(app, "the-second")
    counters.flush()

    lines = operated(app)("history", "shop.*").stdout.splitlines()
    page = Visitor(application(app))
    recent = page.get().body.partition("Recent</h2>")[2]

    assert lines[0].split() == ["WHEN", "EVENT", "LOCK", "LABEL", "TASK", "ID", "HOLDER", "WORKER"]
    assert ["conflict skipped" in line and "shop.catalogue" in line for line in lines[1:]] == [True, True]
    assert ["the-second" in lines[1], "the-first" in lines[2], "the-holder" in lines[1]] == [True] * 3
    assert 0 < recent.index("the-second") < recent.index("the-first")
    assert "conflict skipped" in recent
    assert "0 of 2 unusual events" in page.get("/", "name=other").body
    assert operated(app)("history", "other.*").stdout == ""


def test_text_of_any_kind_reaches_no_terminal(app: Celery) -> None:
    skip(app, "\x1b[31mid\n")
    counters.note(store_of(app), "singleton:v3:{half:0}", "lost", "expired", "half", Facts("\udc80", label=EVIL))
    counters.flush()

    told = operated(app)("history").stdout
    page = Visitor(application(app)).get()

    assert page.status == 200
    assert "&lt;b&gt;7&lt;/b&gt;" in page.body
    assert "<b>" not in page.body
    assert len(told.splitlines()) == 3
    assert "\x1b" not in told
    assert "\\x1b[31mid\\n" in told
    assert "\\udc80" in told


@pytest.mark.parametrize("number", [0, 3, 5, 6])
def test_so_many_are_kept_as_the_setting_says_and_who_reads_learns_since_when(app: Celery, number: int) -> None:
    app.conf.singleton_lock_history = number
    for each in range(5):
        skip(app, f"id-{each}")

    events = history(app)

    assert [event["task_id"] for event in events] == ["id-4", "id-3", "id-2", "id-1", "id-0"][:number]
    assert bool(store_of(app).fields("singleton:v3:history")) == bool(number)
    oldest = events[-1]["at"][:19].replace("T", " ") if events else ""
    kept = f"of {len(events)} unusual events{oldest and f' since {oldest} UTC'} (singleton_lock_history={number}).\n"
    for arguments, shown in ([], len(events)), (["shop.*"], len(events)), (["other.*"], 0):
        assert operated(app)("history", *arguments).stderr == f"{shown} {kept}"


def test_a_history_that_is_off_does_not_say_that_nothing_has_happened(app: Celery) -> None:
    app.conf.singleton_lock_history = 0
    skip(app)
    counters.flush()
    assert "(singleton_lock_history=0)" in recent(app)


def test_a_history_that_cannot_be_read_does_not_say_that_nothing_has_happened(app: Celery) -> None:
    # Damaged, or another program's.
    store_of(app).call("SET", "singleton:v3:history", "x")
    assert "(singleton_lock_history=500)" in recent(app)


def recent(app: Celery) -> str:
    page = Visitor(application(app)).get().body
    assert "Last hour: not known" in page
    assert "What has happened is not known" in page
    return page.partition("Recent</h2>")[2]


def test_what_others_have_written_hides_nothing(app: Celery) -> None:
    skip(app, "the-call")
    counters.flush()
    store = store_of(app)
    for number, text in enumerate(["x", "[]", "{}", '{"at": 1e99, "key": "k"}', "7"]):
        store.call("HSET", "singleton:v3:history", f"other-{number}", text)
    later = history(app)[0] | {"task_id": "the-later-call", "at": "2001-02-03T04:05:06.007+00:00", "of_later": {}}
    store.call("HSET", "singleton:v3:history", "later", json.dumps(later))

    events = history(app)

    assert [event["task_id"] for event in events] == ["the-call", "the-later-call"]
    assert "2001-02-03 04:05:06" in operated(app)("history").stdout


def test_an_event_of_an_outage_is_written_once_the_store_is_back(app: Celery, valkey: Server) -> None:
    skip(app, "the-call")
    with valkey.client() as client:
        client.config_set("maxmemory", 1)
        try:
            counters.flush()
            assert store_of(app).fields("singleton:v3:history") == {}
        finally:
            client.config_set("maxmemory", 0)

    assert [event["task_id"] for event in history(app)] == ["the-call"]


def outcomes(operate: Operate, task: Any) -> list[tuple[str, str | None, str | None]]:
    events = json.loads(operate("history", "--json").stdout)
    return [(each["event"], each["outcome"], each["task_id"]) for each in events if each["task_name"] == task.name]


def told(operate: Operate, task: Any, number: int = 1) -> Callable[[], Any]:
    return lambda: len(outcomes(operate, task)) >= number and outcomes(operate, task)


def test_why_did_it_not_run_last_night(operate: Operate, recorder: Recorder) -> None:
    # A holder is told dead while its lease is still there.
    with workers(APP, {"TEST_TTL": "10"}, concurrency=3):
        # A call that is rescheduled and then runs is nothing unusual.
        first = tasks.by_policy["reschedule"].delay("w", gate="it is refused")
        until(lambda: recorder.events("enter"), "it runs", timeout=PROMPTLY)
        second = tasks.by_policy["reschedule"].delay("w")
        hung = tasks.skipped.delay("k", 60.0)
        until(lambda: len(recorder.events("enter")) == 2, "it runs", timeout=PROMPTLY)
        with pytest.raises(TaskRevokedError):
            tasks.skipped.delay("k").get(timeout=PROMPTLY)
        (lease,) = store_of(tasks.app).holders(tasks.skipped.lock_key_for("k"))
        Inventory(store_of(tasks.app)).break_lock(lease.key, [lease.token], "alice")
        with pytest.raises(TaskRevokedError):
            hung.get(timeout=PROMPTLY)
        recorder.open_gate("it is refused")
        assert [each.get(timeout=PROMPTLY) for each in (first, second)] == [0, 0]
        killed = tasks.warned.delay("k", 60.0)
        until(lambda: len(recorder.events("enter")) == 4, "it runs", timeout=PROMPTLY)
        (dying,) = store_of(tasks.app).holders(tasks.warned.lock_key_for("k"))
        os.kill(dying.pid or 0, signal.SIGKILL)

        of_skipped = until(told(operate, tasks.skipped, 2), "it is told", timeout=PROMPTLY)
        of_killed = until(told(operate, tasks.warned), "it is told", timeout=PROMPTLY)

    assert ("lost", "broken", hung.id) in of_skipped
    assert ("conflict", "skipped") in [each[:2] for each in of_skipped]
    assert of_killed == [("holder_died", None, killed.id)]
    assert outcomes(operate, tasks.by_policy["reschedule"]) == []
