"""The steps of docs/how-to/migrate.md, and back: what a call meets that was sent on the other side."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kombu import pools

from tests.pages.conftest import ROOT
from tests.servers import Server
from tests.waiting import SOON, until
from tests.workers import workers

PROGRAM = """
from celery import Celery
from redis import Redis

app = Celery("shop", broker={url!r}, backend={url!r})
{side}
@app.task(name="shop.import_orders", **options)
def import_orders(user_id):
    return f"imported {{user_id}}"
"""

NEW = """
from celery_singleton_lock import SingletonTask
options = dict(base=SingletonTask, lock_mode="until_executed")
"""

OLD = {
    "celery-singleton": """
from celery_singleton import Singleton
app.conf.singleton_backend_url = {url!r}
options = dict(base=Singleton)
""",
    "celery-once": """
from celery_once import QueueOnce
app.conf.ONCE = dict(backend="celery_once.backends.Redis", settings=dict(url={url!r}, default_timeout=3600))
options = dict(base=QueueOnce, once=dict(graceful=True))
""",
    "celery-once-task": """
from celery_once_task import OnceTask, OnceTaskUnlockBootStep, configure, setup_once_task_signals
configure(redis_url={url!r})
setup_once_task_signals()
app.steps["worker"].add(OnceTaskUnlockBootStep)
options = dict(base=OnceTask)
""",
    "celery-heimdall": """
from celery_heimdall import HeimdallTask
class AtTheShop(HeimdallTask):
    abstract = True
    def setup_redis(self):
        return Redis.from_url({url!r})
options = dict(base=AtTheShop, heimdall=dict(unique=True))
""",
}


@pytest.fixture(
    params=[
        "celery-singleton",
        pytest.param("celery-once", marks=pytest.mark.prove),
        pytest.param("celery-once-task", marks=pytest.mark.prove),
        pytest.param("celery-heimdall", marks=pytest.mark.prove),
    ]
)
def sides(request: pytest.FixtureRequest, folder: Path, valkey: Server) -> Iterator[dict[str, ModuleType]]:
    modules = {}
    for name, side in {"before": OLD[request.param], "after": NEW}.items():
        text = PROGRAM.format(url=valkey.url, side=side.format(url=valkey.url))
        (folder / f"shop_{name}.py").write_text(text)
        modules[name] = importlib.import_module(f"shop_{name}")
    yield modules
    pools.reset()
    for module in modules.values():
        del sys.modules[module.__name__]
        module.app.close()


def start(folder: Path, side: str) -> Any:
    return workers(f"shop_{side}", {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])})


def test_a_call_of_the_library_before_runs_in_a_worker_of_this_one(sides: dict[str, ModuleType], folder: Path) -> None:
    before, after = sides["before"].import_orders, sides["after"].import_orders

    with start(folder, "after"):
        assert before.delay(1).get(timeout=SOON) == "imported 1"
        until(lambda: not after.lock_state(1).holders, "it holds nothing")
        assert after.delay(1).get(timeout=SOON) == "imported 1"


def test_a_call_of_this_library_runs_in_a_worker_of_the_one_before_and_keeps_no_key(
    sides: dict[str, ModuleType], folder: Path
) -> None:
    before, after = sides["before"].import_orders, sides["after"].import_orders

    with start(folder, "before"):
        first = after.delay(1)
        assert first.get(timeout=SOON) == "imported 1"
        # That worker knows nothing of its mark, but its result says that it has ended.
        second = after.delay(1)
        assert second.id != first.id
        assert second.get(timeout=SOON) == "imported 1"
        assert before.delay(2).get(timeout=SOON) == "imported 2"
