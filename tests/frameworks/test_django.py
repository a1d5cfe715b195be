"""Django: a task is published when the transaction has been committed, and its result is in the database."""

import html
import io
import json
import os
import re
import runpy
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import redis

from tests.contract.asking import Waiter
from tests.frameworks import stage
from tests.frameworks.stage import make_tables, manage
from tests.servers import free_port
from tests.waiting import until
from tests.workers import workers

SHOP = "tests.frameworks.django_shop"
visited = partial(stage.visited, first=f"import {SHOP}, django; django.setup()")


def visit() -> Any:
    from django.db import transaction
    from django.test import Client
    from django_celery_results.models import TaskResult

    from tests.frameworks.django_shop.models import Supplier
    from tests.frameworks.django_shop.tasks import import_catalogue
    from tests.frameworks.feed import recorder

    client = Client()

    def ended(number: int) -> list[Any]:
        results = TaskResult.objects.filter(date_done__isnull=False).exclude(status__in=["PENDING", "STARTED"])
        return until(lambda: list(results) if results.count() == number else [], f"{number} have ended")

    try:
        with transaction.atomic():
            import_catalogue.delay_on_commit(3)
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    status = client.post("/suppliers/1/import").status_code
    until(lambda: recorder.events("enter"), "it runs")
    client.post("/suppliers/1/import")
    busy = client.post("/suppliers/1/delete")
    (duplicate,) = ended(1)
    recorder.open_gate("the last page")
    holder = next(each for each in ended(2) if each.task_id != duplicate.task_id)
    later = client.post("/suppliers/2/delete").status_code
    return {
        "deleted": [busy.status_code, busy.json()["import"] == holder.task_id, later],
        "answer": status,
        "duplicate": [duplicate.status, holder.task_id in duplicate.result],
        "holder": [holder.status, holder.result],
        "supplier": Supplier.objects.get(pk=1).state,
        "bodies": [event.key for event in recorder.events("enter")],
    }


EVIL = "<script>alert(1)</script>"
FULL = "Runs cannot lock: the store is full"
PAGE, BREAK = "/admin/celery_singleton_lock/lock/", "/admin/celery_singleton_lock/lock/break/"


class Visitors:
    def __init__(self) -> None:
        from celery_singleton_lock.definition.settings import store_of
        from celery_singleton_lock.stores.records import Claim
        from tests.frameworks.django_shop.tasks import import_catalogue

        held: Any = {"task_id": "the-holder", "hostname": "w1@web", "pid": 7, "label": EVIL}
        self.held = Claim(import_catalogue.lock_key_for(7), "the-token", 60.0, **held)
        self.free = import_catalogue.lock_key_for(8)
        self.app = import_catalogue.app
        self.store = store_of(self.app)
        self.store.acquire(self.held)

    def client(self, name: str, *permissions: str, is_staff: bool = True) -> Any:
        from django.contrib.auth.models import Permission, User
        from django.test import Client

        user, _ = User.objects.get_or_create(username=name, is_staff=is_staff)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client = Client(enforce_csrf_checks=True)
        client.force_login(user)
        return client

    @property
    def operator(self) -> Any:
        return self.client("operator", "view_lock", "break_lock")

    def noted(self) -> list[Any]:
        from django.contrib.admin.models import LogEntry

        return [[each.user.username, each.object_id, each.get_change_message()] for each in LogEntry.objects.all()]


def token_in(page: Any) -> str:
    return str(re.findall(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.content.decode())[0])


def sent(client: Any, page: Any, key: str, holder: str) -> list[Any]:
    form = {"csrfmiddlewaretoken": token_in(page), "key": key, "holder": holder, "name": "shop"}
    answer = client.post(BREAK, form, REMOTE_ADDR="10.0.0.7")
    if answer.status_code != 302:
        return [answer.status_code]
    after = client.get(answer.headers["Location"]).content.decode()
    return [302, *re.findall(r'<li class="(\w+)">(.*?)</li>', after)]


def run_commands() -> Any:
    from django.core.management import call_command

    def told(*command: str) -> str:
        call_command(*command, stdout=(said := io.StringIO()))
        return said.getvalue()

    dumped = [json.loads(told("dumpdata", *more)) for more in ([], ["--all"])]
    return {
        "has a table": "celery_singleton_lock" in told("makemigrations", "--check", "--dry-run"),
        "no issues": "no issues" in told("check"),
        "dumped": ["auth.permission" in {each["model"] for each in rows} for rows in dumped],
    }


def visit_admin() -> Any:
    from django.test import Client

    from celery_singleton_lock.leases.counters import counters
    from celery_singleton_lock.stores.records import Claim, Facts, lock_name_of

    all_of = Visitors()
    skipped = Facts(task_id="the-skipped", label=EVIL)
    counters.record(all_of.store, all_of.held.key, "conflict", "skipped", "shop.import", skipped, "the-holder")
    counters.flush()
    visitors = {
        "stranger": Client(),
        "customer": all_of.client("customer", "view_lock", "break_lock", is_staff=False),
        "clerk": all_of.client("clerk"),
        "reader": all_of.client("reader", "view_lock"),
        "operator": all_of.operator,
    }
    waits = Claim(all_of.held.key, "another", 60.0, task_id="the-waiter")
    # As a server does it: for Celery, another thread may have another app.
    with ThreadPoolExecutor(1) as pool, Waiter(all_of.store, waits) as waiter:
        waiter.ask()
        pages = dict(zip(visitors, pool.map(lambda client: client.get(PAGE), visitors.values()), strict=True))
    read, page = pages["reader"].content.decode(), pages["operator"].content.decode()
    return {
        "status": {name: answer.status_code for name, answer in pages.items()},
        "in the index": {name: PAGE in visitors[name].get("/admin/").content.decode() for name in ("clerk", "reader")},
        "in the frame": ["Django administration" in page, 'href="/admin/"' in page],
        "read": [
            "the-holder" in read,
            "w1@web:7" in read,
            "waiting: the-waiter" in read,
            "Ask to stop" in read,
            "the-token" in read,
            "The locks are well." in read,
            " of 1m00s</td>" in read,
            "1 of 1 unusual events" in read,
            f"<td>{lock_name_of(all_of.held.key)}</td><td>{html.escape(EVIL)}</td><td>the-skipped</td>" in read,
        ],
        "operated": ["the-holder" in page, "Ask to stop" in page],
        "filtered": "the-holder" in visitors["reader"].get(PAGE, {"name": "nothing"}).content.decode(),
        "label": [EVIL in page, "&lt;script&gt;alert(1)&lt;/script&gt;" in page],
        "needs no extra": "flask" not in sys.modules,
        "other pages": [visitors["operator"].get(f"{PAGE}{path}").status_code for path in ("add/", "x/change/")],
        "commands": run_commands(),
    }


def test_the_admin_shows_the_locks_to_those_who_may_see_them_and_no_command_wants_a_table(env: dict[str, str]) -> None:
    make_tables(env)

    assert visited(visit_admin, env) == {
        "status": {"stranger": 302, "customer": 302, "clerk": 403, "reader": 200, "operator": 200},
        "in the index": {"clerk": False, "reader": True},
        "in the frame": [True, True],
        "read": [True, True, True, False, False, True, True, True, True],
        "operated": [True, True],
        "filtered": False,
        "label": [False, True],
        "needs no extra": True,
        "other pages": [404, 404],
        "commands": {"has a table": False, "no issues": True, "dumped": [True, True]},
    }


def look_while_the_store_is_full(all_of: Visitors) -> Any:
    with redis.Redis.from_url(all_of.app.conf.singleton_lock_url) as client:
        client.config_set("maxmemory", 1)
        try:
            return all_of.operator.get(PAGE)
        finally:
            client.config_set("maxmemory", 0)


def ask_while_the_store_is_away(all_of: Visitors, operator: Any, page: Any) -> list[Any]:
    all_of.app.conf.singleton_lock_url = f"redis://:pa55@127.0.0.1:{free_port()}/0"
    form = {"csrfmiddlewaretoken": token_in(page), "key": all_of.held.key, "holder": "the-holder"}
    answer = operator.post(BREAK, form)
    away = operator.get(answer.headers["Location"])
    text = away.content.decode()
    return [answer.status_code, away.status_code, " failed: " in text, "pa55" in text, len(all_of.noted())]


def break_in_the_admin() -> Any:
    all_of = Visitors()
    full = look_while_the_store_is_full(all_of)
    operator, reader, store = all_of.operator, all_of.client("reader", "view_lock"), all_of.store
    page, key = operator.get(PAGE), all_of.held.key
    form = {"key": key, "holder": "the-holder"}
    refused = {
        "reader": reader.post(BREAK, {"csrfmiddlewaretoken": token_in(reader.get(PAGE)), **form}).status_code,
        "without a token": operator.post(BREAK, form).status_code,
        "by a link": operator.get(BREAK, form).status_code,
        "unknown key": sent(operator, page, "celery-task-meta-1", "x"),
        "gone lease": sent(operator, page, all_of.free, "the-holder"),
    }
    before = [store.asked_to_stop_by(all_of.held, "broken"), all_of.noted()]
    asked = sent(operator, page, key, "the-holder")
    store.mark_queued(all_of.free, "the-queued", 60.0, limit=0, cooldown=0.0)
    return {
        "refused": refused,
        "before": before,
        "asked": asked,
        "by": store.asked_to_stop_by(all_of.held, "broken"),
        "shown": "asked to stop by operator@10.0.0.7" in operator.get(PAGE).content.decode(),
        "dropped": sent(operator, page, all_of.free, ""),
        "noted": [[name, {key: "held", all_of.free: "free"}[about], text] for name, about, text in all_of.noted()],
        "recent actions": key in operator.get("/admin/").content.decode(),
        "full": [full.status_code, *(words in full.content.decode() for words in (FULL, 'role="alert"', "the-holder"))],
        "away": ask_while_the_store_is_away(all_of, operator, page),
    }


def test_who_may_asks_a_holder_to_stop_and_is_told_of_a_store_that_is_full_or_away(env: dict[str, str]) -> None:
    make_tables(env)

    told = visited(break_in_the_admin, env)

    asked = "Asked to stop. The holder learns of it at its next renewal, within a third of its TTL."
    assert told == {
        "refused": {
            "reader": 403,
            "without a token": 403,
            "by a link": 405,
            "unknown key": [302, ["warning", "Nothing was done: celery-task-meta-1 is not a lock key of this app."]],
            "gone lease": [302, ["warning", "Nothing was done: nobody was there any more."]],
        },
        "before": [None, []],
        "asked": [302, ["success", asked]],
        "by": "operator@10.0.0.7",
        "shown": True,
        "dropped": [302, ["success", "The marks are gone."]],
        "noted": [["operator", "free", "Dropped its marks."], ["operator", "held", "Asked the-holder to stop."]],
        "recent actions": True,
        "full": [200, True, True, True],
        "away": [302, 503, True, False, 2],
    }


FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"CELERY_SINGLETON_LOCK_TTL": "30s", "CELERY_SINGLETON_LOCK_TTTL": 3, "CELERY_SINGLETON_LOCK_URL": "ftp://x"},
        [
            "CELERY_SINGLETON_LOCK_TTL='30s' is not allowed",
            "did you mean CELERY_SINGLETON_LOCK_TTL?",
            "CELERY_SINGLETON_LOCK_URL: unknown scheme",
        ],
    ),
    (
        {"CELERY_SINGLETON_LOCK_URL": None, "CELERY_BROKER_URL": "amqp://", "CELERY_SINGLETON_LOCK_LOG_LABELS": "yes"},
        ["set CELERY_SINGLETON_LOCK_URL, for example", "CELERY_SINGLETON_LOCK_LOG_LABELS='yes'"],
    ),
]


@pytest.mark.parametrize(("settings", "says"), FAULTS, ids=["wrong", "none"])
def test_what_a_start_refuses_is_an_error_of_the_check_in_the_words_of_the_settings(
    env: dict[str, str], settings: dict[str, Any], says: list[str]
) -> None:
    said = manage({**env, "SHOP_SETTINGS": json.dumps(settings)}, "check", code=1)

    assert said.count("celery_singleton_lock.E002") == len(says)
    assert [words for words in says if words not in said] == []
    assert not re.search(r"(?<![\w.])singleton_lock_", said)


@pytest.mark.prove
def test_what_a_pool_refuses_is_said_by_the_check(env: dict[str, str]) -> None:
    memory = manage(
        {**env, "SHOP_SETTINGS": '{"CELERY_SINGLETON_LOCK_URL": "memory://"}'}, "check", "--fail-level=WARNING", code=1
    )

    assert "W002" in memory
    assert "CELERY_SINGLETON_LOCK_URL='memory://'" in memory


@pytest.mark.prove
def test_a_cache_in_the_database_of_the_locks_is_noted_by_the_doctor(env: dict[str, str]) -> None:
    server = env["SHOP_REDIS"].removesuffix("/0").replace("127.0.0.1", "localhost")

    def noted(**caches: dict[str, Any]) -> list[str]:
        backend = {"BACKEND": "django.core.cache.backends.redis.RedisCache"}
        made = {name: backend | cache for name, cache in caches.items()}
        command = [sys.executable, "-m", "celery", "-A", SHOP, "singleton", "doctor", "--json", "--timeout", "10"]
        shop = {**os.environ, **env, "SHOP_SETTINGS": json.dumps({"CACHES": made, "CELERY_BROKER_URL": "nowhere://"})}
        done = subprocess.run(command, env=shop, capture_output=True, text=True, timeout=120)
        return [check["detail"] for check in json.loads(done.stdout)["checks"] if "FLUSHDB" in check["detail"]]

    (said,) = noted(
        default={"LOCATION": f"{server}/7"},
        far={"LOCATION": f"redis://127.0.0.1:{free_port()}/0"},
        other={"LOCATION": server, "OPTIONS": {"db": "7"}},
        pages={"LOCATION": f"{server}/0"},
        pages_2={"LOCATION": [server], "OPTIONS": {"db": "0"}},
        sessions={"LOCATION": f"{server}?db=0"},
    )
    assert said.endswith(": pages, pages_2, sessions")


def visit_with_a_coroutine() -> Any:
    from celery import shared_task
    from django.core import checks

    from celery_singleton_lock import SingletonTask

    @shared_task(base=SingletonTask, name="shop.async")
    async def body() -> None: ...

    return [(each.id, each.msg) for each in checks.run_checks() if "shop.async" in each.msg]


@pytest.mark.prove
def test_a_body_that_nobody_would_await_is_a_warning(env: dict[str, str]) -> None:
    ((name, said),) = visited(visit_with_a_coroutine, env)

    assert name == "celery_singleton_lock.W004"
    assert "task shop.async is an `async def`" in said


def visit_without_an_app() -> Any:
    import django
    from django.conf import settings

    known = runpy.run_path("tests/frameworks/django_shop/settings.py")
    # The package of the shop imports its app.
    known["INSTALLED_APPS"].remove("tests.frameworks.django_shop")
    known["DATABASES"]["default"]["NAME"] = ":memory:"
    settings.configure(**{name: each for name, each in known.items() if name.isupper()} | {"ROOT_URLCONF": "bare_urls"})
    django.setup()
    from django.contrib import admin
    from django.contrib.auth.models import User
    from django.core.checks import run_checks
    from django.core.management import call_command
    from django.test import Client
    from django.urls import path

    sys.modules["bare_urls"] = types.ModuleType("bare_urls")
    vars(sys.modules["bare_urls"])["urlpatterns"] = [path("admin/", admin.site.urls)]
    call_command("migrate", verbosity=0)
    client = Client()
    found = [each.id for each in run_checks() if str(each.id).startswith("celery_singleton_lock")]
    client.force_login(User.objects.create_superuser("root"))
    page = client.get(PAGE)
    return {"found": found, "status": page.status_code, "says": "has no Celery app" in page.content.decode()}


@pytest.mark.prove
def test_that_the_project_does_not_import_its_app_is_said_as_such(env: dict[str, str]) -> None:
    assert stage.visited(visit_without_an_app, env) == {
        "found": ["celery_singleton_lock.E001"],
        "status": 503,
        "says": True,
    }


def test_a_duplicate_is_skipped_and_what_is_rolled_back_is_not_published(env: dict[str, str]) -> None:
    make_tables(env)
    with workers(SHOP, env):
        told = visited(visit, env)

    assert told == {
        "deleted": [409, True, 200],
        "answer": 202,
        "duplicate": ["REVOKED", True],
        "holder": ["SUCCESS", "null"],
        "supplier": "imported",
        "bodies": ["1"],
    }
