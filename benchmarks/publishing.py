"""What a call that is unique in the queue costs to publish, beside Celery itself and two others, in one run.

Every call has an argument of its own, so each is sent. The numbers are shares of plain Celery's throughput.
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from celery import Celery
from rich.console import Console

from benchmarks import server_side
from benchmarks.rounds import Spread, interleaved
from celery_singleton_lock import SingletonTask
from tests.servers import running

CYCLES, CALLS = 60, 50


def publishers(url: str) -> dict[str, Callable[[], object]]:
    """One call of each kind of task; those of libraries that are not installed are left out."""
    app = Celery("publishing", broker=url, backend=url.replace("/0", "/1"))
    app.conf.singleton_lock_url = url.replace("/0", "/2")
    app.conf.singleton_backend_url = url.replace("/0", "/3")
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": url.replace("/0", "/4")}}

    @app.task
    def plain(number: int) -> None: ...

    @app.task(base=SingletonTask, lock_mode="until_executed")
    def ours(number: int) -> None: ...

    tasks: dict[str, Any] = {"plain Celery": plain, "celery-singleton-lock": ours, **others(app)}
    numbers = itertools.count()
    return {name: lambda task=task: task.delay(next(numbers)) for name, task in tasks.items()}


def others(app: Celery) -> dict[str, Any]:
    """Tasks of the libraries that are installed."""
    found = {}
    for label, module, base in (
        ("celery-singleton", "celery_singleton", "Singleton"),
        ("celery-once", "celery_once", "QueueOnce"),
    ):
        with suppress(ImportError):
            found[label] = app.task(base=getattr(import_module(module), base), name=label)(_call)
    return found


def _call(number: int) -> None: ...


def main() -> None:
    """Measure and print."""
    console = Console()
    with running("valkey") as server:
        actions = publishers(server.url)
        seconds = interleaved({name: (action, CALLS) for name, action in actions.items()}, CYCLES)
        plain = seconds["plain Celery"]
        for name, each in seconds.items():
            share = Spread.of([one / other for one, other in zip(plain, each, strict=True)])
            commands = server_side.commands(server.url, actions[name])
            console.print(f"{name:24} {share.median:.2f} of plain throughput, {commands} commands a call")


if __name__ == "__main__":
    main()
