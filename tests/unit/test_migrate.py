"""The snippets of docs/how-to/migrate.md, executed."""

import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, uuid
from celery_singleton import Singleton
from celery_singleton.util import generate_lock

from celery_singleton_lock import SingletonOptions, SingletonTask
from tests.acceptance.test_start import check_worker
from tests.servers import Server

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "migrate.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_there_is_a_section_for_each_origin() -> None:
    assert len(SNIPPETS) == 1
    assert re.findall(r"^## From (.*)$", PAGE, re.MULTILINE) == [
        "celery-singleton",
        "celery-once",
        "celery-once-task",
        "celery-heimdall",
        "a lock by hand",
    ]


def test_a_stub_in_the_publisher_keeps_duplicates_out_and_makes_the_key_of_the_worker() -> None:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://stub"
    exec(SNIPPETS[0], {"app": app})
    stub: Any = app.tasks["shop.import_orders"]

    assert stub.delay(1).id == stub.delay(1, force=True).id != stub.delay(2).id
    mine = stub.apply_async((1,), task_id="mine")
    assert mine.id == stub.delay(1).id


def test_every_option_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\block_(?!expiry|for|state)\w+", PAGE))
    assert named <= {*SingletonOptions.__annotations__}


(CLEAN_UP,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def test_the_clean_up_matches_each_key_of_celery_singleton_and_none_of_ours() -> None:
    (pattern,) = re.findall(r"grep -xE '(.*)'", CLEAN_UP)

    def body() -> None: ...

    ours: Any = Celery("shop", set_as_current=False).task(base=SingletonTask, name="sync", shared=False)(body)
    assert re.fullmatch(pattern, generate_lock("shop.sync", task_args=[1]))
    for prefix in ("SINGLETONLOCK_", "SINGLETONLOCK_" + 32 * "a"):
        ours.app.conf.singleton_lock_prefix = prefix
        # The options are read anew after one of them was set.
        ours.lock_name = "sync"
        assert ours.lock_key_for().startswith(f"{prefix}:v")
        assert not re.fullmatch(pattern, ours.lock_key_for())


def test_a_task_can_be_moved_while_others_are_with_celery_singleton(valkey: Server) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(singleton_backend_url=valkey.url, singleton_key_prefix="SHOP_", singleton_lock_expiry=60)
    app.conf.update(singleton_lock_url=valkey.url, singleton_lock_queue_ttl=60, task_default_queue=uuid())

    @app.task(base=Singleton, name="shop.old", shared=False, unique_on=["x"])
    def old(x: int) -> None: ...

    @app.task(base=SingletonTask, name="shop.new", shared=False, lock_key=("x",), lock_mode="until_executed")
    def new(x: int) -> None: ...

    for task in (old, new):
        assert len({task.delay(1).id, task.delay(1).id, task.delay(2).id}) == 2
    with valkey.client() as client:
        assert {key[:5] for key in client.scan_iter()} == {"SHOP_", "singl"}
    check_worker(app, "solo")


@pytest.mark.parametrize(
    ("unique_on", "options"),
    [(["x"], {"lock_key": ("x",)}), ("x", {"lock_key": ("x",)}), ([], {}), (None, {})],
)
def test_the_same_calls_are_duplicates_as_with_celery_singleton(valkey: Server, unique_on: Any, options: Any) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(singleton_backend_url=valkey.url, singleton_lock_url=valkey.url, task_default_queue=uuid())

    def body(x: int, y: int) -> None: ...

    old: Any = app.task(base=Singleton, name="shop.old", shared=False, unique_on=unique_on)(body)
    new: Any = app.task(base=SingletonTask, name="shop.new", shared=False, lock_mode="until_executed", **options)(body)

    calls = [(1, 1), (1, 2), (2, 1), (1, 1)]
    sent = [[task.delay(*call).id for call in calls] for task in (old, new)]
    assert len({*sent[0]}) == len({*sent[1]}) == (2 if unique_on else 3)
