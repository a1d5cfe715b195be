"""Which tasks, and which runs, have Celery tell of what happens around them."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import VERSION, Celery
from celery.exceptions import Ignore
from celery.signals import task_postrun, task_prerun

from celery_singleton_lock import SingletonTask, listening, settings
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer
from tests.tracing import tracer_of


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    for signal in (task_prerun, task_postrun):
        monkeypatch.setattr(signal, "receivers", [])
    app = Celery("listening", broker="memory://", backend="cache+memory://", set_as_current=False)
    monkeypatch.setitem(settings._stores, app, MemoryStore())
    yield app
    app.close()


def nothing() -> None: ...


def calls_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
    return super(type(self), self).__call__(*args, **kwargs)


def heard(app: Celery, body: Any = None, **options: Any) -> tuple[bool, bool]:
    """Whether starts and ends are heard once a worker has made the task ready and has run it."""
    task = app.task(base=SingletonTask, name="task", **options)(body or nothing)
    tracer_of(task)("the-id", [], {}, {"id": "the-id", "task": "task"})
    return bool(task_prerun.receivers), bool(task_postrun.receivers)


def test_the_usual_run_is_heard_by_nobody(app: Celery) -> None:
    assert heard(app) == (False, False)


def test_a_start_is_heard_where_it_is_stored(app: Celery) -> None:
    assert heard(app, track_started=True) == (True, False)


def test_a_start_is_heard_where_it_comes_to_be_stored_later(app: Celery) -> None:
    task = app.task(base=SingletonTask, name="task")(nothing)
    tracer_of(task)

    task.track_started = True

    assert task_prerun.receivers


@pytest.mark.parametrize(
    "options",
    [
        {"lock_mode": "until_executed"},
        {"lock_on_conflict": "reschedule"},
        {"lock_on_conflict": "rerun"},
        {"before_start": lambda *_: None},
        {"__call__": calls_ours},
    ],
    ids=["queue", "reschedule", "rerun", "before_start", "__call__"],
)
def test_ends_are_heard_of_what_may_leave_something_before_it_comes_to_its_lock(
    app: Celery, options: dict[str, Any]
) -> None:
    task = app.task(base=SingletonTask, name="task", **options)(nothing)

    tracer_of(task)

    assert task_postrun.receivers


def test_the_end_of_a_run_that_raises_is_heard(app: Celery) -> None:
    def ignore() -> None:
        raise Ignore

    assert heard(app, ignore) == (False, True)


def test_the_end_of_a_run_that_could_not_release_is_heard(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = Lease.release, []

    def not_at_first(lease: Lease, ending: Any = None) -> Answer | None:
        calls.append(lease)
        return release(lease, ending) if len(calls) > 1 else None

    monkeypatch.setattr(Lease, "release", not_at_first)

    class Careless(SingletonTask):
        abstract = True

        def after_return(self, *_: Any) -> None:
            """Forgets to call super, so that task_postrun has the last word."""

    task = app.task(base=Careless, name="task")(nothing)
    tracer_of(task)("the-id", [], {}, {"id": "the-id", "task": "task"})

    assert len(calls) == 2
    assert not calls[0].unreleased


def test_an_end_that_a_signal_breaks_off_is_gone_through_once_more(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = app.task(base=SingletonTask, name="task")(nothing)
    left: list[Any] = []

    def leave(*facts: Any) -> None:
        left.append(facts)
        if len(left) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(listening, "leave_nothing", leave)
    with pytest.raises(KeyboardInterrupt):
        listening._after_its_end(task=task, state="RETRY")

    assert left == [(task, "RETRY", None)] * 2


def test_before_celery_5_7_all_is_heard_from_the_start() -> None:
    program = (
        "import celery_singleton_lock; from celery.signals import task_prerun, task_postrun; "
        "print(len(task_prerun.receivers), len(task_postrun.receivers))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.split() == (["1", "1"] if VERSION < (5, 7) else ["0", "0"])
