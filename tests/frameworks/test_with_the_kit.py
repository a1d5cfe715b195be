"""The kit in each framework: a test says that somebody else holds the lock of a call."""

import os
from importlib import import_module
from typing import Any

import pytest

from tests.frameworks.stage import visited

SHOPS = {
    "tests.frameworks.django_shop": ("tests.frameworks.django_shop.tasks", "skipped"),
    "tests.frameworks.flask_shop": ("tests.frameworks.flask_shop", "skipped"),
    "tests.frameworks.fastapi_shop": ("tests.frameworks.fastapi_shop", "unpublished"),
}


def import_in(shop: str) -> tuple[Any, Any]:
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


@pytest.mark.prove
@pytest.mark.parametrize("shop", SHOPS)
def test_a_test_says_that_somebody_else_holds_the_lock(shop: str, env: dict[str, str]) -> None:
    # No server is there.
    nowhere = {name: value.replace("127.0.0.1", "redis.invalid") for name, value in env.items()}

    assert visited(with_the_kit, {**nowhere, "SHOP": shop}) == [SHOPS[shop][1]]
