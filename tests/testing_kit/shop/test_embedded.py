"""In a worker inside the test's process a call ends as in any other worker: its host name has no `@`."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import _set_task_join_will_block
from celery.worker import WorkController
from celery.worker import state as state_of_worker

from celery_singleton_lock import CallRevoked, SingletonTask
from celery_singleton_lock.testing import HELD_BY_TEST, hold

Wait = Callable[[Callable[[], Any]], None]


@pytest.fixture(scope="session")
def celery_config() -> dict[str, Any]:
    """The settings of `celery_session_worker`, which starts before the locks of any test."""
    polling = {"polling_interval": 0.01}
    in_memory = {"broker_url": "memory://", "result_backend": "cache+memory://", "singleton_lock_url": "memory://"}
    # Queues in memory are those of the process, and this worker outlives its test.
    return {**in_memory, "broker_transport_options": polling, "task_default_queue": "of the session"}


@pytest.fixture(scope="session")
def celery_worker_pool() -> str:
    return "threads"


@pytest.fixture(scope="session")
def celery_worker_parameters() -> dict[str, Any]:
    return {"concurrency": 4, "perform_ping_check": False, "shutdown_timeout": 30.0}


@pytest.fixture
def worker_of_the_application(celery_app: Celery) -> Iterator[None]:
    is_ready = threading.Event()
    options = {"pool": "threads", "concurrency": 4, "hostname": "web-1", "without_heartbeat": True}
    worker = WorkController(app=celery_app, ready_callback=lambda _: is_ready.set(), **options)
    thread = threading.Thread(target=worker.start, daemon=True)
    thread.start()
    assert is_ready.wait(20)
    # A worker takes the whole process for its own, where nobody may wait for a result.
    _set_task_join_will_block(False)
    yield
    state_of_worker.should_stop = 0
    thread.join(30)
    state_of_worker.should_stop = None
    assert not thread.is_alive()


may_end = threading.Event()
VARIANTS: dict[str, dict[str, str]] = {
    "join": {"lock_on_conflict": "join"},
    "until_executed": {"lock_mode": "until_executed"},
    "rerun": {"lock_on_conflict": "rerun"},
    "replace": {"lock_on_conflict": "replace"},
}


def body(number: int) -> str:
    while not may_end.is_set():
        threading.Event().wait(0.01)
    return f"by {number}"


@pytest.fixture(params=["celery_worker", "celery_session_worker", "worker_of_the_application"])
def tasks(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A task of each variant, in an app whose worker runs and keeps its locks in memory."""
    is_of_the_session = "session" in request.param
    app: Celery = request.getfixturevalue("celery_session_app" if is_of_the_session else "celery_app")
    named = {"base": SingletonTask, "lock_key": (), "lock_ttl": 3, "shared": False}
    tasks = {kind: app.task(name=f"embedded.{kind}", **named, **options)(body) for kind, options in VARIANTS.items()}
    if not is_of_the_session:
        request.getfixturevalue("singleton_locks")
    request.getfixturevalue(request.param)
    app.set_default()
    may_end.clear()
    yield tasks
    # Before the worker ends, which waits for its bodies.
    may_end.set()


def running(wait_for: Wait, task: Any, **options: Any) -> Any:
    result = task.apply_async((1,), **options)
    wait_for(lambda: [holder.task_id for holder in task.lock_holders(1)] == [result.id])
    return result


def test_a_call_that_joins_ends_with_the_result_of_the_run(tasks: dict[str, Any], wait_for: Wait) -> None:
    task = tasks["join"]
    first = running(wait_for, task)
    joined = task.delay(2)
    wait_for(lambda: joined.state == "RETRY")
    may_end.set()

    assert joined.get(timeout=20) == first.get(timeout=20) == "by 1"


def test_the_caller_of_a_call_that_is_not_sent_gets_the_result_of_the_run(
    tasks: dict[str, Any], wait_for: Wait
) -> None:
    task = tasks["until_executed"]
    first = running(wait_for, task)
    second = task.delay(2)
    may_end.set()

    assert second.get(timeout=20) == "by 1"
    assert second.id == first.id


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_the_newest_call_runs_next(tasks: dict[str, Any], wait_for: Wait, policy: str) -> None:
    task = tasks[policy]
    first = running(wait_for, task)
    newest = task.delay(2)
    wait_for(lambda: newest.state == "RETRY")
    if policy == "rerun":
        may_end.set()
        assert first.get(timeout=20) == "by 1"
    else:
        with pytest.raises(TaskRevokedError, match=newest.id):
            first.get(timeout=20)
        may_end.set()

    assert newest.get(timeout=20) == "by 2"


def test_a_duplicate_of_a_run_that_keeps_no_result_ends_at_once(tasks: dict[str, Any], wait_for: Wait) -> None:
    task = tasks["until_executed"]
    running(wait_for, task, ignore_result=True)

    with pytest.raises(CallRevoked, match="cannot be read here"):
        task.delay(2).get(timeout=20)


def test_a_duplicate_of_an_eager_run_ends_at_once(tasks: dict[str, Any], wait_for: Wait) -> None:
    task = tasks["until_executed"]
    threading.Thread(target=task.apply, args=((1,),), daemon=True).start()
    wait_for(lambda: task.lock_holders(1))

    with pytest.raises(CallRevoked, match="cannot be read here"):
        task.delay(2).get(timeout=20)


@pytest.mark.parametrize("by", ["hold", "an eager run"])
def test_a_call_that_joins_what_leaves_no_result_runs_itself(tasks: dict[str, Any], wait_for: Wait, by: str) -> None:
    task = tasks["join"]
    if by == "hold":
        with hold(task, 2) as holder:
            assert holder.task_id == HELD_BY_TEST
            joined = task.delay(2)
            wait_for(lambda: joined.state == "RETRY")
    else:
        threading.Thread(target=task.apply, args=((1,),), daemon=True).start()
        wait_for(lambda: task.lock_holders(1))
        joined = task.delay(2)
        wait_for(lambda: joined.state == "RETRY")
    may_end.set()

    assert joined.get(timeout=20) == "by 2"
