"""Rows of operators: of what cannot be read, of queued calls, and of turns; and how a lock or a call is named."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Queue
from werkzeug.test import Client

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.operations.rows import Locks
from celery_singleton_lock.stores.records import Claim
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store
from celery_singleton_lock.web import application
from tests.acceptance import app as tasks
from tests.acceptance.conftest import Operate, operated
from tests.acceptance.test_operations import NO, USAGE
from tests.contract.asking import Waiter
from tests.servers import Server

DIGEST = "850619f2bc8f15f0cb96f1808d711840"
KEY = f"singleton:v3:{{shop.import:{DIGEST}}}"


def redis_of() -> redis.Redis:
    return redis.Redis.from_url(tasks.app.conf.singleton_lock_url)


def key_of(name: str, number: int = 0) -> str:
    return f"singleton:v3:{{{name}:{number:032x}}}"


FOREIGN: dict[str, Callable[[Any, Any], Any]] = {
    "text": lambda redis, key: redis.set(key, "x"),
    "list": lambda redis, key: redis.rpush(key, "x"),
    "stream": lambda redis, key: redis.xadd(key, {"a": "b"}),
    "places": lambda redis, key: redis.hset(key, mapping={"places": "many", "fence": "1"}),
    "grant": lambda redis, key: redis.hset(key, mapping={"fence": "1", "1": "t", "t": "9" * 17, "1:": "nonsense"}),
    "fence": lambda redis, key: redis.hset(key, mapping={"fence": "x", "queued": f"{'9' * 16} id"}),
}


def test_who_interrupts_a_listing_waits_for_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[str]:
        yield KEY
        raise KeyboardInterrupt

    monkeypatch.setattr(Inventory, "keys", interrupted)

    with pytest.raises(KeyboardInterrupt):
        next(Locks(tasks.app).surveys())


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_cannot_be_read_says_so_and_hides_no_other(operate: Operate, store: Store, kind: str) -> None:
    foreign = key_of("foreign")
    with redis_of() as client:
        FOREIGN[kind](client, foreign)
    store.acquire(Claim(KEY, "t", 60.0, task_id="id-1", hostname="w", pid=7))

    listed = {row["key"]: row for row in json.loads(operate("list", "--json").stdout)}
    shown = operate("show", foreign.rpartition(":")[0]).stdout
    broken = operate("break", foreign.rpartition(":")[0], "--yes", code=NO).stderr
    marks = operate("break", "--marks", "*", "--yes", code=NO).stderr
    page = Client(application(tasks.app))

    assert (listed[KEY]["state"], listed[foreign]["state"]) == ("held", "unreadable")
    assert listed[foreign]["problem"]
    assert listed[foreign]["expires_in"] is None
    assert "unreadable" in shown
    assert "Nothing to break" in broken
    assert "because they are held: 1" in marks
    assert "id-1" in operate("show", "id-1").stdout
    text = page.get("/").get_data(as_text=True)
    assert page.get("/locks.json").status_code == 200
    assert all(word in text for word in ("id-1", "unreadable", "1 key cannot be read"))
    metrics = page.get("/metrics").get_data(as_text=True)
    assert "singleton_lock_unreadable 1.0" in metrics
    assert f'singleton_lock_holders{{task="{listed[KEY]["task_name"]}"}} 1.0' in metrics


def test_a_count_that_is_no_number_hides_no_other(store: Store) -> None:
    store.count("singleton:v3:stats", {"acquired::shop.import": 3}, 2.0)
    with redis_of() as client:
        client.hset("singleton:v3:stats", "acquired::other", "many")

    metrics = Client(application(tasks.app)).get("/metrics").get_data(as_text=True)

    assert 'singleton_lock_acquired_total{task="shop.import"} 3.0' in metrics


def test_queued_calls_have_their_task_and_their_age_and_are_sorted_by_it(operate: Operate, store: Store) -> None:
    task = tasks.by_mode["until_executed"]
    ages = {"id-young": 5.0, "id-old": 500.0, "id-middle": 50.0}
    for number, (task_id, age) in enumerate(ages.items()):
        left = task.lock_options.queue_ttl - age
        store.mark_queued(key_of(task.name, number), task_id, left, limit=0, cooldown=0.0)

    rows = json.loads(operate("list", "--json").stdout)
    planned = operate("break", "--marks", "*", "--dry-run").stdout

    assert [row["task_id"] for row in rows] == ["id-old", "id-middle", "id-young"]
    assert {row["task_name"] for row in rows} == {task.name}
    assert all(age <= row["queued_for"] < age + 60 for row, age in zip(rows, sorted(ages.values())[::-1], strict=True))
    assert "8m2" in operate("list").stdout
    assert all(task_id in planned for task_id in ages)


def test_a_queued_call_has_its_task_before_its_import(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_app.py").write_text(
        "from celery import Celery\napp = Celery('late', include=['late_tasks'], set_as_current=False)\n"
    )
    (tmp_path / "late_tasks.py").write_text(
        "from celery_singleton_lock import SingletonTask\n"
        "from late_app import app\n"
        "@app.task(base=SingletonTask, name='found.late', lock_mode='until_executed', shared=False)\n"
        "def late(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = importlib.import_module("late_app").app
    app.conf.singleton_lock_url = tasks.app.conf.singleton_lock_url
    store.mark_queued(key_of("found.late"), "id-1", 3000.0, limit=0, cooldown=0.0)

    (row,) = json.loads(operated(app)("list", "--json").stdout)

    assert row["task_name"] == "found.late"
    assert row["queued_for"] >= 600


ONLY_FUNCTION = {"task_routes": (lambda *_, **__: "imports",)}
QUEUES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "by default": ({}, {}, {}),
    "by a default of the app's": ({"task_default_queue": "shop"}, {}, {"queue": None}),
    "by its call": ({}, {"queue": "exports"}, {"queue": "imports"}),
    "by its call, as an object": ({}, {}, {"queue": Queue("imports")}),
    "by its task": ({"task_routes": {"found.put": "exports"}}, {"queue": "imports"}, {}),
    "by a table": ({"task_routes": {"found.put": "imports"}}, {}, {}),
    "by a second table": ({"task_routes": [{"other.*": "a"}, {"found.*": {"queue": "imports"}}]}, {}, {}),
    "by a default beside a table": ({"task_routes": {"other.*": "exports"}}, {}, {}),
    "by its call before a function": (ONLY_FUNCTION, {}, {"queue": "exports"}),
    "not known: by a function": (ONLY_FUNCTION, {}, {}),
    "not known: by an exchange of the task's": ({}, {"exchange": "shop", "routing_key": "imports"}, {}),
    "not known: by an exchange of the call's": ({}, {}, {"exchange": "shop"}),
}


def put_by(url: str, settings: dict[str, Any], options: dict[str, Any], call: dict[str, Any]) -> Celery:
    app = Celery("put", broker=url, set_as_current=False)
    app.conf.update({"singleton_lock_url": url.removesuffix("/0") + "/2", **settings})

    def put() -> None: ...

    made = {"lock_mode": "until_executed", "shared": False, **options}
    app.task(base=SingletonTask, name="found.put", **made)(put).apply_async(**call)
    return app


# Celery 5.7 says that options of a task that name a queue are going to end.
BY_TASKS = pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")


@BY_TASKS
@pytest.mark.parametrize("way", QUEUES)
def test_a_queued_call_says_in_which_queue_it_was_put_if_its_publisher_knows_it(valkey: Server, way: str) -> None:
    with put_by(valkey.url, *QUEUES[way]) as app, valkey.client() as client:
        (row,) = json.loads(operated(app)("list", "--json").stdout)
        head, line = operated(app)("list").stdout.splitlines()
        if way.startswith("not known"):
            assert "queue" not in row
            assert "QUEUE" not in head
            return
        # The broker has a list for each queue that is not empty.
        (queue,) = client.scan_iter(_type="list")
        assert row["queue"] == queue
        assert head.split()[:3] == ["LOCK", "STATE", "QUEUE"]
        assert line.split()[:3] == ["found.put", "queued", queue]
        assert f"in <code>{queue}</code>" in Client(application(app)).get("/").get_data(as_text=True)
        assert queue in operated(app)("show", row["task_id"]).stdout


def test_who_routes_by_turns_is_asked_once_for_each_call(valkey: Server) -> None:
    asked = []

    def by_turns(name: str, *_: Any, **__: Any) -> str:
        asked.append(name)
        return f"queue-{len(asked)}"

    with put_by(valkey.url, {"task_routes": (by_turns,)}, {}, {}) as app:
        app.tasks["found.put"].apply_async()

    assert asked == ["found.put"]


def test_one_turn_is_dropped_by_its_task_id_and_those_of_the_living_stay(operate: Operate, store: Store) -> None:
    store.acquire(Claim(KEY, "t", 60.0, task_id="id-1"))
    waits = Claim(KEY, "living", 60.0, task_id="id-living")
    with Waiter(store, waits) as living:
        living.ask()
        store.acquire(Claim(KEY, "dead", 60.0, task_id="id-dead", turn_for=180.0, waits_here=True))
        done = json.loads(operate("break", "id-dead", "--yes", "--json").stdout)
        store.release(Claim(KEY, "t", 60.0), 1)
        left = operate("break", KEY, "--yes", code=NO).stderr

        assert (done["asked"], done["dropped"]) == ([], ["turns"])
        assert "alive" in left
        assert [turn.task_id for turn in store.survey([KEY])[0].turns] == ["id-living"]


# How a lock, or a call, is named.

NAMES = {name: (["id-of-a-call"], ["queued"]) for name in (KEY, KEY[:30], DIGEST[:8], f"{DIGEST[:8]}…")}
# A call alone leaves the marks of others.
NAMES |= dict.fromkeys(("id-of-a-call", "id-of", "id-of-a…"), (["id-of-a-call"], [])) | {"behi": ([], ["queued"])}


@pytest.mark.parametrize("what", NAMES)
def test_a_lock_and_a_call_are_found_by_a_beginning(operate: Operate, store: Store, what: str) -> None:
    store.acquire(Claim(KEY, "t", 60.0, task_id="id-of-a-call"))
    store.mark_queued(KEY, "behind", 60.0, limit=0, cooldown=0.0)

    shown = operate("show", what).stdout
    plan = json.loads(operate("break", what, "--dry-run", "--json").stdout)

    assert KEY in shown
    assert (plan["asked"], plan["dropped"]) == NAMES[what]


@pytest.mark.parametrize("command", [["show"], ["break", "--yes"]])
def test_what_is_ambiguous_or_empty_is_refused(operate: Operate, store: Store, command: list[str]) -> None:
    for number in (1, 2):
        store.acquire(Claim(key_of("shop", number), "t", 60.0, task_id=f"id-{number}"))

    assert all(f"id-{number}" in operate(*command, "id-", code=USAGE).stderr for number in (1, 2))
    assert all(key_of("shop", n) in operate(*command, key_of("shop")[:20], code=USAGE).stderr for n in (1, 2))
    for nothing in ("", "…", " "):
        assert "Give a lock key" in operate(*command, nothing, code=USAGE).stderr
    assert not any(state.asked_by for state in store.survey([key_of("shop", 1), key_of("shop", 2)]))
