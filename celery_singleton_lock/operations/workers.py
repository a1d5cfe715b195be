"""The workers of an app: asked once, in the background, for the commands."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from celery.utils.imports import symbol_by_name

from celery_singleton_lock.operations.finding import Finding, a_few
from celery_singleton_lock.start import faults_with
from celery_singleton_lock.stores.base import clock

_QUESTIONS = ("stats", "active", "active_queues")
# To connect to the broker.
_TO_CONNECT = 5.0


@dataclass(frozen=True)
class Workers:
    """The answers of the workers.

    Attributes:
        pools: By worker, its pool; None if this process does not know that.
        slots: By worker, how many bodies may run at once.
        queues: By worker, the queues from which it takes messages.
        active: By worker, the task ids of its runs.
        problem: The reason why no worker could be asked.
    """

    pools: Mapping[str, type | None] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[str, set[str]] = field(default_factory=dict)
    active: Mapping[str, set[str]] = field(default_factory=dict)
    problem: str | None = None


def ask_workers(app: Celery, timeout: float) -> Callable[[], Workers]:
    """Ask all workers in the background; they have *timeout* seconds to answer. The result waits for them."""
    answers: dict[str, Any] = {}
    problems: list[str] = []
    asking = [threading.Thread(target=_ask, args=(app, timeout, each, answers, problems)) for each in _QUESTIONS]
    for thread in asking:
        # A silent broker must not delay the end of the process.
        thread.daemon = True
        thread.start()
    # One question after the other, because the app may allow one connection only.
    give_up_at = clock() + len(asking) * timeout + _TO_CONNECT

    def heard() -> Workers:
        for thread in asking:
            thread.join(max(0.0, give_up_at - clock()))
        return _workers(dict(answers), problems[0] if problems else "the broker does not answer")

    return heard


def _ask(app: Celery, timeout: float, question: str, answers: dict[str, Any], problems: list[str]) -> None:
    try:
        answers[question] = getattr(app.control.inspect(timeout=timeout), question)() or {}
    except Exception as error:  # noqa: BLE001 (whatever the transport raises)
        problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])


def _workers(answers: dict[str, Any], problem: str) -> Workers:
    if any(question not in answers for question in _QUESTIONS):
        return Workers(problem=problem)
    pools = {name: stats.get("pool", {}) for name, stats in answers["stats"].items()}
    return Workers(
        {name: _pool_of(pool) for name, pool in pools.items()},
        {name: int(pool.get("max-concurrency") or 1) for name, pool in pools.items()},
        {name: {each["name"] for each in queues} for name, queues in _listed(answers["active_queues"])},
        {name: {each["id"] for each in runs} for name, runs in _listed(answers["active"])},
    )


def _listed(answers: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """The lists of the workers that have answered with one; a worker with an error answers with its text."""
    yield from ((name, answer) for name, answer in answers.items() if isinstance(answer, list))


def _pool_of(said: Mapping[str, Any]) -> type | None:
    name = str(said.get("implementation"))
    # Import nothing else just because a worker names it.
    if not name.startswith("celery.concurrency."):
        return None
    try:
        pool: type = symbol_by_name(name)
    except (ImportError, AttributeError):
        return None
    return pool


def about_workers(app: Celery, workers: Workers) -> Finding:
    """The finding about the workers: whether each can run the tasks that it may be given."""
    if workers.problem is not None:
        return Finding("workers", None, f"nobody could be asked: {workers.problem}")
    if not workers.pools:
        return Finding("workers", None, "none has answered; one with the pool solo cannot while it runs a task")
    faults = [
        f"{name}: {fault}"
        for name, pool in sorted(workers.pools.items())
        if pool is not None
        for fault in faults_with(app, pool, workers.queues.get(name, set()))
    ]
    if faults:
        return Finding("workers", False, "; ".join(faults))
    told = [f"{name} ({workers.slots[name]} at once)" for name in sorted(workers.pools)]
    return Finding("workers", True, f"{a_few(told)}: each can run what it may be given")
