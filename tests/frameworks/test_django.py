"""Django: a task is published when the transaction has been committed, and its result is in the database."""

import re
from typing import Any
from urllib.parse import urlencode

from tests.frameworks.stage import make_tables, visited
from tests.gates import open_gate
from tests.waiting import until
from tests.workers import workers

SHOP = "tests.frameworks.django_shop"


def visit() -> Any:
    import django

    from tests.frameworks import django_shop  # noqa: F401 (it names the settings)

    django.setup()
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
    (duplicate,) = ended(1)
    open_gate(recorder, "the last page")
    holder = next(each for each in ended(2) if each.task_id != duplicate.task_id)
    return {
        "answer": status,
        "duplicate": [duplicate.status, holder.task_id in duplicate.result],
        "holder": [holder.status, holder.result],
        "supplier": Supplier.objects.get(pk=1).state,
        "bodies": [event.key for event in recorder.events("enter")],
    }


def visit_admin() -> Any:
    import django

    from tests.frameworks import django_shop  # noqa: F401 (it names the settings)

    django.setup()
    from django.contrib.admin.models import LogEntry
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    from celery_singleton_lock.settings import store_of
    from celery_singleton_lock.stores.records import Claim, Facts
    from tests.frameworks.django_shop.tasks import import_catalogue

    def visitor(name: str, *permissions: str, is_staff: bool = True) -> Client:
        user = User.objects.create_user(name, is_staff=is_staff)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client = Client(enforce_csrf_checks=True)
        client.force_login(user)
        return client

    home = "/admin/django_shop/singletonlock/"
    held = Claim(import_catalogue.lock_key_for(7), "token", 60.0, facts=Facts(task_id="the-holder"))
    store = store_of(import_catalogue.app)
    store.acquire(held)
    visitors = {
        "stranger": Client(),
        "customer": visitor("customer", "view_locks", "break_locks", is_staff=False),
        "clerk": visitor("clerk"),
        "reader": visitor("reader", "view_locks"),
        "operator": visitor("operator", "view_locks", "break_locks"),
    }
    shown = {name: client.get(home) for name, client in visitors.items()}
    read, page = shown["reader"].content.decode(), shown["operator"].content.decode()
    (token,) = set(re.findall(r'name="csrf-token" content="([^"]+)"', page))
    form = {"key": held.key, "holder": "the-holder"}

    def send(name: str, **fields: str) -> int:
        body, kind = urlencode(form | fields), "application/x-www-form-urlencoded"
        said = visitors[name].post(f"{home}break", body, kind, headers={"Sec-Fetch-Site": "same-origin"})
        return int(said.status_code)

    return {
        "status": {name: answer.status_code for name, answer in shown.items()},
        "in the index": {name: home in visitors[name].get("/admin/").content.decode() for name in ("clerk", "reader")},
        "read": ["the-holder" in read, "Ask to stop" in read],
        "page": [f'action="{home}break"' in page, shown["operator"].headers["X-Frame-Options"]],
        "json": visitors["reader"].get(f"{home}locks.json").json()[0]["task_id"],
        "may not": [
            send("clerk", csrf_token=token),
            send("reader", csrf_token=token),
            send("operator", csrf_token="another"),
        ],
        "before": store.broken_by(held),
        "asked": send("operator", csrf_token=token),
        "by": store.broken_by(held),
        "noted": [[entry.user.username, entry.object_id == held.key] for entry in LogEntry.objects.all()],
    }


def test_the_admin_shows_the_locks_to_those_who_may_see_them(env: dict[str, str]) -> None:
    make_tables(env)

    told = visited(visit_admin, env)

    assert told == {
        "status": {"stranger": 302, "customer": 302, "clerk": 403, "reader": 200, "operator": 200},
        "in the index": {"clerk": False, "reader": True},
        "read": [True, False],
        "page": [True, "DENY"],
        "json": "the-holder",
        "may not": [403, 404, 400],
        "before": None,
        "asked": 303,
        "by": "operator@127.0.0.1",
        "noted": [["operator", True]],
    }


def test_a_duplicate_is_skipped_and_what_is_rolled_back_is_not_published(env: dict[str, str]) -> None:
    make_tables(env)
    with workers(SHOP, env):
        told = visited(visit, env)

    assert told == {
        "answer": 202,
        "duplicate": ["REVOKED", True],
        "holder": ["SUCCESS", "2"],
        "supplier": "imported",
        "bodies": ["1"],
    }
