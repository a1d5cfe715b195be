"""The kit and the commands, in each framework: the kit says who holds a lock, and the commands who holds it now."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from tests.frameworks.stage import make_tables, visited
from tests.gates import open_gate
from tests.recorder import Recorder
from tests.waiting import until
from tests.workers import workers

SHOPS = {
    "tests.frameworks.django_shop": ("tests.frameworks.django_shop.tasks", "skipped"),
    "tests.frameworks.flask_shop": ("tests.frameworks.flask_shop", "skipped"),
    "tests.frameworks.fastapi_shop": ("tests.frameworks.fastapi_shop", "unpublished"),
}
every_shop = pytest.mark.parametrize("shop", SHOPS)


def import_in(shop: str) -> tuple[Any, Any]:
    """The app of the shop, and its task."""
    module = import_module(shop)
    if shop.endswith("django_shop"):
        import_module("django").setup()
    return getattr(module, "celery_app", None) or module.app, import_module(SHOPS[shop][0]).import_catalogue


def with_the_kit() -> Any:
    from celery_singleton_lock.testing import hold, memory_store, recorded

    app, import_catalogue = import_in(os.environ["SHOP"])
    app.conf.task_always_eager = True
    with memory_store(app), recorded() as locks, hold(import_catalogue, 7):
        import_catalogue.delay(7)
    return [conflict.outcome for conflict in locks.conflicts]


def publish() -> Any:
    _, import_catalogue = import_in(os.environ["SHOP"])
    return import_catalogue.delay(7).id


@pytest.mark.prove
@every_shop
def test_a_test_says_that_somebody_else_holds_the_lock(shop: str, env: dict[str, str]) -> None:
    # No server is there.
    nowhere = {name: value.replace("127.0.0.1", "redis.invalid") for name, value in env.items()}

    assert visited(with_the_kit, {**nowhere, "SHOP": shop}) == [SHOPS[shop][1]]


@pytest.mark.prove
@every_shop
def test_an_operator_sees_who_holds_the_lock(shop: str, env: dict[str, str]) -> None:
    ask = asking(shop, env)
    recorder = Recorder(env["TEST_STORE"].removesuffix("/0") + "/3")
    if shop.endswith("django_shop"):
        make_tables(env)
    with workers(shop, env):
        task_id = visited(publish, {**env, "SHOP": shop})
        (held,) = until(lambda: json.loads(ask("list", "--json")), "it runs", timeout=60)
        asked = json.loads(ask("doctor", "--json", "--timeout", "10"))
        open_gate(recorder, "the last page")
        until(lambda: not json.loads(ask("list", "--json")), "it has run", timeout=60)
    recorder.close()

    assert (held["task_id"], held["state"]) == (task_id, "held")
    assert asked["ok"], asked


def asking(shop: str, env: dict[str, str]) -> Callable[..., str]:
    """Type `celery -A <shop> singleton ...`."""

    def ask(*arguments: str) -> str:
        command = [sys.executable, "-m", "celery", "-A", shop, "singleton", *arguments]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout

    return ask
