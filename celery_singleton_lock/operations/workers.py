"""The workers of an app, by their own answers, and whether they can run what is published."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from celery import Celery
from celery.utils.imports import symbol_by_name

from celery_singleton_lock.checks import faults_with, lockable, queue_of
from celery_singleton_lock.operations.rows import Row, a_few
from celery_singleton_lock.stores.clock import clock

Found = tuple[bool | None, str]
"""Whether all is well, or None if that could not be checked; and the details."""

_OURS = "singleton_store"
_QUESTIONS = ("stats", "active", "active_queues", "reserved", _OURS)
# Seconds to connect to the broker.
_TO_CONNECT = 5.0


class Worker(NamedTuple):
    """The answers of one worker; None for a missing answer."""

    pool: type | None
    slots: int
    queues: set[str] | None
    active: set[str] | None
    reserved: set[str]
    store: dict[str, Any]
    """The reply to `singleton_store`: `problem`, or by how many seconds the store's clock is `ahead`."""


def ask_workers(app: Celery, timeout: float) -> tuple[dict[str, Worker], str | None]:
    """The workers that have answered within *timeout* seconds, by their names; or why none could be asked."""
    answers = dict[str, Any]()
    problems = list[str]()

    def ask(question: str) -> None:
        try:
            # `inspect` has public methods for Celery's own requests only, and `singleton_store` is ours.
            answers[question] = app.control.inspect(timeout=timeout)._request(question) or {}  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 (whatever the transport raises)
            problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])

    # Daemons, so that a silent broker does not keep this process from ending.
    asking = [threading.Thread(target=ask, args=(question,), daemon=True) for question in _QUESTIONS]
    for thread in asking:
        thread.start()
    # If the app allows one connection only, the questions go out one after another.
    give_up_at = clock() + len(asking) * timeout + _TO_CONNECT
    for thread in asking:
        thread.join(max(0.0, give_up_at - clock()))
    if len(answers) < len(_QUESTIONS):
        return {}, problems[0] if problems else "the broker does not answer"

    def told(question: str, name: str, field: str) -> set[str] | None:
        said = answers[question].get(name)
        # A worker whose answer has failed sends the text of its error.
        return {each[field] for each in said} if isinstance(said, list) else None

    workers = {}
    for name, stats in answers["stats"].items():
        pool = stats.get("pool", {})
        store = answers[_OURS].get(name)
        workers[name] = Worker(
            _pool_named(str(pool.get("implementation"))),
            int(pool.get("max-concurrency") or 1),
            queues=_queues_in(answers["active_queues"].get(name)),
            active=told("active", name, "id"),
            reserved=told("reserved", name, "id") or set(),
            store=store if isinstance(store, dict) else {},
        )
    return workers, None


def _queues_in(said: Any) -> set[str] | None:
    """The names that a route may use for the worker's queues; None if the worker has not sent them."""
    if not isinstance(said, list):
        return None
    names = {each.get(word) for each in said for word in ("name", "alias")}
    # A route names the exchange of a broadcast, because each worker has its own queue.
    names |= {each["exchange"]["name"] for each in said if each["exchange"]["type"] == "fanout"}
    return {str(name) for name in names if name}


def _pool_named(name: str) -> type | None:
    pool = None
    # Import only Celery's own modules, because the name comes from another process.
    if name.startswith("celery.concurrency."):
        with suppress(ImportError, AttributeError):
            pool = symbol_by_name(name)
    return pool


def about_workers(app: Celery, workers: Mapping[str, Worker], silence: str | None, rows: Iterable[Row]) -> Found:
    """Whether the workers can run the tasks of *app*, and take the queues of these tasks and of the calls in *rows*."""
    if silence is not None:
        return None, f"the workers could not be asked: {silence}"
    if not workers:
        is_well = None if app.conf.task_always_eager or not lockable(app) else False
        return is_well, "no worker has answered: start one; a solo worker cannot answer while it runs a task"
    faults = []
    for name, worker in sorted(workers.items()):
        if worker.pool is not None:
            faults += [f"{name}: {fault}" for fault in faults_with(app, worker.pool, worker.queues or set())]
        if "problem" in worker.store:
            faults.append(f"{name} cannot use the store: {worker.store['problem']}")
    faults += _not_taken(app, rows, queues_of(workers))
    parts = a_few([f"{name} ({workers[name].slots} at once)" for name in sorted(workers)])
    return not faults, "; ".join(faults) or f"{parts}: each can run the tasks of its queues"


def queues_of(workers: Mapping[str, Worker]) -> set[str] | None:
    """All queues that the workers take; None if a worker has not named its queues."""
    queues = [worker.queues for worker in workers.values()]
    return None if None in queues else set[str]().union(*filter(None, queues))


def _not_taken(app: Celery, rows: Iterable[Row], taken: set[str] | None) -> list[str]:
    """A fault for each queue to which tasks are routed or calls were published, and which no worker takes."""
    if taken is None:
        return []
    found = defaultdict[str, set[str]](set)
    for task in lockable(app):
        if (queue := queue_of(app, task)) is not None:
            found[queue].add(task.name)
    for row in rows:
        if row.about.queue is not None:
            found[row.about.queue].add(row.name)
    return [
        f"no worker that has answered takes the queue {queue!r}, to which calls of {', '.join(sorted(names))} go: "
        f"start one with -Q {queue}, or correct the route"
        for queue, names in sorted(found.items())
        if queue not in taken
    ]
