"""The workers of an app: asked once, in the background, for whoever looks after locks."""

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
    """What the workers have answered.

    Attributes:
        pools: By worker, its pool; None if this process does not know that.
        slots: By worker, how many bodies may run at once.
        queues: By worker, from which it takes messages.
        active: By worker, the task ids of what it runs.
        problem: Why none could be asked.
    """

    pools: Mapping[str, type | None] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[str, set[str]] = field(default_factory=dict)
    active: Mapping[str, set[str]] = field(default_factory=dict)
    problem: str | None = None


def ask_workers(app: Celery, timeout: float) -> Callable[[], Workers]:
    """Have all workers asked, who have *timeout* seconds to answer; the result waits for it."""
    answers: dict[str, Any] = {}
    problems: list[str] = []
    asking = [threading.Thread(target=_ask, args=(app, timeout, each, answers, problems)) for each in _QUESTIONS]
    for thread in asking:
        # A broker that is silent must not keep the process from its end.
        thread.daemon = True
        thread.start()
    # One after the other, if the app allows one connection.
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
    """Of the workers that have answered with a list; one in which something has failed says what."""
    yield from ((name, answer) for name, answer in answers.items() if isinstance(answer, list))


def _pool_of(said: Mapping[str, Any]) -> type | None:
    name = str(said.get("implementation"))
    # Nothing else is imported because somebody says so.
    if not name.startswith("celery.concurrency."):
        return None
    try:
        pool: type = symbol_by_name(name)
    except (ImportError, AttributeError):
        return None
    return pool


def about_workers(app: Celery, workers: Workers) -> Finding:
    """Whether what they are asked to run can run there."""
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
