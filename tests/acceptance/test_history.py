"""The history names calls that did not run, leases that were lost and holders that died."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.leases.counters import counters
from celery_singleton_lock.stores.records import Claim, Facts
from celery_singleton_lock.web import application
from tests.acceptance.conftest import operated
from tests.browsing import Visitor
from tests.servers import Server

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
    held = Claim(task.lock_key_for(supplier, ""), "token-a", 60.0, task_id="the-holder", hostname="w1@web", pid=7)
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
    counters.record(
        store_of(app), "singleton:v3:{half:0}", "lost", "expired", "half", Facts(task_id="\udc80", label=EVIL)
    )
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


@pytest.mark.parametrize("is_off", [True, False], ids=["off", "damaged"])
def test_a_history_that_cannot_be_read_does_not_say_that_nothing_has_happened(app: Celery, *, is_off: bool) -> None:
    if is_off:
        app.conf.singleton_lock_history = 0
        skip(app)
        counters.flush()
    else:
        store_of(app).call("SET", "singleton:v3:history", "x")

    page = Visitor(application(app)).get().body

    assert f"(singleton_lock_history={0 if is_off else 500})" in page.partition("Recent</h2>")[2]
    assert "Last hour: not known" in page
    assert "What has happened is not known" in page


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
