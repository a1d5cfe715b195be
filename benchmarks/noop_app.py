"""The app whose workers run tasks that do nothing: one of each library."""

import logging
import os
import time
from typing import Any

import redis
from celery import Celery

from benchmarks import floors
from benchmarks.libraries import Library, late, usable

STORE = os.environ.get("BENCH_STORE", "redis://127.0.0.1:6379/0")
LOCKS = os.environ.get("BENCH_LOCKS", STORE.removesuffix("/0") + "/2")
SIGNALS = STORE.removesuffix("/0") + "/3"

app = Celery("noop", broker=STORE, backend=STORE.removesuffix("/0") + "/1")
app.conf.broker_connection_retry_on_startup = True
app.conf[floors.RECORDED_AT] = SIGNALS

# Two lines in the log for each task would cost more than most of what is measured.
for name in ("celery.worker.strategy", "celery.app.trace"):
    logging.getLogger(name).setLevel(logging.WARNING)


def queue_of(library: Library) -> str:
    """Where its worker takes its tasks from."""
    return library.label.replace(", ", "-").replace(" ", "-")


def _noop(library: Library, label: str, **options: bool) -> Any:
    @app.task(name=f"noop {label}", **library.options(None), **options)
    def noop(number: int) -> float:  # noqa: ARG001 (makes each call another one)
        return time.time()

    return noop


def _held(library: Library) -> Any:
    @app.task(name=f"held {library.label}", **library.options(None))
    def held(number: int) -> None:  # noqa: ARG001 (makes each call another one)
        with redis.Redis.from_url(SIGNALS) as signals:
            signals.rpush("begun", 1)
            signals.blpop(["end"], 30)

    return held


for each in usable():
    app.conf.update(each.settings(LOCKS))
    each.prepare(app)
NOOPS = {each.label: _noop(each, each.label) for each in usable()}
NOOPS_LATE = {late(each.label): _noop(each, late(each.label), acks_late=True) for each in usable()}
HELD = {each.label: _held(each) for each in usable()}
