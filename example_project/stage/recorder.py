"""Records that the shop's tasks write while they run.

The overlaps are counted from what the bodies write, and they write without
asking the lock: a lock that fails cannot hide it.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from celery import Task

from celery_singleton_lock import signals
from example_project.app import BROKER_URL
from example_project.stage.records import Records

_TICK = 0.05

records = Records(BROKER_URL)


def key_of(task: Task, args: Sequence[object]) -> str:
    """The name of the work that must not run twice at once, in the shop's own words."""
    counts = [] if getattr(task, "lock_key", None) == () else args[:1]
    return " ".join([task.name.rpartition(".")[2], *map(str, counts)])


@contextmanager
def recorded(task: Task) -> Iterator[Callable[[float], None]]:
    """Write down when a body enters and leaves. Yield a function with which the body works."""
    run = {"run": secrets.token_hex(8), **_origin(task)}
    records.write("enter", **run)
    try:
        yield partial(_work, run)
    finally:
        records.write("leave", **run)


def _work(run: dict[str, str | int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(_TICK, left))
        # A killed body writes no end, so its last tick says until when it ran.
        records.write("tick", **run)


def _origin(task: Task) -> dict[str, str | int]:
    request = task.request
    return {
        "key": key_of(task, request.args),
        "task_id": request.id,
        "worker": request.hostname.partition("@")[0],
        "pid": os.getpid(),
    }


@signals.lock_conflict.connect
def _conflict(sender: Task, outcome: str, **_: object) -> None:
    records.write("conflict", outcome=outcome, **_origin(sender))


@signals.lock_lost.connect
def _lost(reason: str, **_: object) -> None:
    records.write("lost", reason=reason)
