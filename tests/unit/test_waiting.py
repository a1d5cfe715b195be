"""For how long a run waits in its place: which time limit counts, where it is enforced, and whose it is."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery.app.task import Context

from celery_singleton_lock.runs import waiting

FOR_EVER = float("inf")
Limits = tuple[float | None, float | None]

NONE: Limits = (None, None)


def run(call: Limits | None = None, task: Limits = NONE, age: float = 0.0, **request: Any) -> Any:
    hard, soft = task
    timed = SimpleNamespace(request=Context(timelimit=call, **request), time_limit=hard, soft_time_limit=soft)
    return SimpleNamespace(task=timed, is_item=False, age=age)


@pytest.fixture
def prefork(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is a process of a prefork pool."""
    monkeypatch.setattr(waiting, "current_process", lambda: SimpleNamespace(daemon=True))


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what the worker was started with."""
    monkeypatch.setattr(waiting, "_of_the_worker", NONE)

    def started_with(hard: float | None, soft: float | None) -> None:
        waiting.remember_limits(SimpleNamespace(time_limit=hard, soft_time_limit=soft))

    return started_with


@pytest.mark.usefixtures("prefork")
@pytest.mark.parametrize(
    ("call", "task", "worker", "longest"),
    [
        (None, NONE, NONE, FOR_EVER),
        (NONE, NONE, NONE, FOR_EVER),
        ((40, None), NONE, NONE, 10),
        ([None, 40], NONE, NONE, 10),
        ((80, 40), NONE, NONE, 10),
        (None, (40, None), NONE, 10),
        (NONE, (None, 40), NONE, 10),
        (NONE, NONE, (40, None), 10),
        (NONE, NONE, (80, 40), 10),
        ((80, None), (40, None), (20, None), 20),
        ((None, None), (80, None), (20, None), 20),
        ((80, None), (None, 40), (20, 20), 10),
    ],
)
def test_a_quarter_of_the_smaller_limit_that_celery_would_choose(
    command_line: Any, call: Any, task: Limits, worker: Limits, longest: float
) -> None:
    command_line(*worker)

    assert waiting.longest_wait(run(call, task)) == longest


@pytest.mark.usefixtures("prefork")
def test_what_was_spent_before_it_waits_counts_as_well() -> None:
    assert waiting.longest_wait(run((40, None), age=3)) == 7
    assert waiting.longest_wait(run((40, None), age=3, lock_waited=5)) == 2


@pytest.mark.usefixtures("prefork")
def test_in_eager_mode_there_is_no_limit() -> None:
    assert waiting.longest_wait(run((40, None), is_eager=True)) == FOR_EVER


@pytest.mark.parametrize(("library", "longest"), [("gevent", 20), ("eventlet", FOR_EVER), (None, FOR_EVER)])
def test_only_what_the_pool_enforces_counts(
    monkeypatch: pytest.MonkeyPatch, library: str | None, longest: float
) -> None:
    patched = None if library is None else SimpleNamespace(__name__=library)
    monkeypatch.setattr(waiting, "patched_by", lambda: patched)

    assert waiting.longest_wait(run((80, 40))) == longest
