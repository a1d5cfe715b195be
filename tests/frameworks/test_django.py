"""Django: a task is published when the transaction has been committed, and its result is in the database."""

import os
import subprocess
import sys
from typing import Any

from tests.frameworks.stage import visited
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


def test_a_duplicate_is_skipped_and_what_is_rolled_back_is_not_published(env: dict[str, str]) -> None:
    settings = {"DJANGO_SETTINGS_MODULE": f"{SHOP}.settings"}
    migrate = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity=0"]
    subprocess.run(migrate, env={**os.environ, **env, **settings, "PYTHONPATH": "."}, check=True, timeout=120)
    with workers(SHOP, env):
        told = visited(visit, env)

    assert told == {
        "answer": 202,
        "duplicate": ["REVOKED", True],
        "holder": ["SUCCESS", "2"],
        "supplier": "imported",
        "bodies": ["1"],
    }
