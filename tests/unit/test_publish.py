"""How long a call counts as queued, and what the caller of a duplicate gets."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, uuid
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockHeld, SingletonTask, StoreError, signals
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Claim, Facts, Holder

HOUR = 3600.0
"""The default of `lock_queue_ttl`."""


def lasts(options: dict[str, Any], **of_the_task: Any) -> float:
    """Seconds for which the mark of a call published with *options* is kept."""
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://"

    @app.task(base=SingletonTask, lock_mode="until_executed", lock_on_conflict="raise", lock_name=uuid(), **of_the_task)
    def task() -> None: ...

    task.apply_async(**options)
    with pytest.raises(LockHeld) as held:
        task.delay()
    return held.value.expires_in


def tomorrow() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


@pytest.mark.parametrize(
    ("options", "longer"),
    [
        (dict, 0),
        (lambda: {"countdown": 60}, 60),
        (lambda: {"expires": 90.5}, 90.5),
        (lambda: {"countdown": 60, "expires": 90}, 90),
        (lambda: {"eta": tomorrow()}, 24 * HOUR),
        (lambda: {"eta": tomorrow().replace(tzinfo=None)}, 24 * HOUR),  # in the app's zone: UTC
        (lambda: {"eta": tomorrow() - timedelta(days=2)}, 0),
        (lambda: {"expires": tomorrow().isoformat()}, 24 * HOUR),
    ],
)
def test_a_mark_lasts_until_the_message_may_run_and_then_as_long_as_lock_queue_ttl(
    options: Callable[[], dict[str, Any]], longer: float
) -> None:
    assert lasts(options()) == pytest.approx(HOUR + longer, abs=10)


def test_the_expiry_of_the_task_counts_as_well() -> None:
    assert lasts({}, expires=90) == pytest.approx(HOUR + 90, abs=5)
    assert lasts({"expires": 30}, expires=90) == pytest.approx(HOUR + 30, abs=5)


# Whose result the caller of a duplicate gets.

UNREADABLE = {
    "results go to their own callers": ("rpc://", {}),
    "there are no results": ("disabled://", {}),
    "an item of a map stands for it": ("cache+memory://", {"task_name": "celery.map"}),
    "a task that ignores its results stands for it": ("cache+memory://", {"task_name": "keeps no results"}),
    "a run that no worker runs stands for it": ("cache+memory://", {"hostname": "a-host"}),
}


def duplicate(results: str, holder: dict[str, Any], of_the_call: dict[str, Any] | None = None, **options: Any) -> Any:
    """What the caller gets whose call is not sent, because another one runs."""
    app = Celery(broker="memory://", backend=results, set_as_current=False)
    app.conf.singleton_lock_url = "memory://"

    @app.task(name="keeps no results", ignore_result=True)
    def ignoring() -> None: ...

    @app.task(base=SingletonTask, lock_mode="until_executed", lock_name=uuid(), **options)
    def task() -> None: ...

    standing = Facts(uuid(), **holder)
    store_of(app).acquire(Claim(task.lock_key_for(), "token", 30, facts=standing))
    result = task.apply_async(**(of_the_call or {}))
    assert result.id == standing.task_id
    return result


@pytest.mark.parametrize("why", UNREADABLE)
@pytest.mark.parametrize("policy", ["skip", "reschedule", "rerun"])
def test_where_nobody_can_read_the_others_result_a_duplicate_ends_as_if_it_was_skipped(why: str, policy: str) -> None:
    result = duplicate(*UNREADABLE[why], lock_on_conflict=policy)

    assert result.ready()
    with pytest.raises(TaskRevokedError, match=result.id):
        result.get(timeout=1)


@pytest.mark.parametrize("why", UNREADABLE)
def test_where_nobody_can_read_it_lock_skip_result_is_in_its_place(why: str) -> None:
    assert duplicate(*UNREADABLE[why], lock_skip_result="skipped").get(timeout=1) == "skipped"


@pytest.mark.parametrize("why", UNREADABLE)
def test_who_wants_no_result_gets_none(why: str) -> None:
    assert duplicate(*UNREADABLE[why], {"ignore_result": True}).get(timeout=1) is None


@pytest.mark.parametrize("holder", [{}, {"hostname": "celery@a-host"}, {"task_name": "unknown here"}], ids=str)
def test_a_result_that_can_be_read_is_the_others(holder: dict[str, Any]) -> None:
    result = duplicate("cache+memory://", holder)
    assert result.state == "PENDING"
    result.backend.store_result(result.id, 42, "SUCCESS")

    assert result.get(timeout=1) == 42


# What is told of it.


@pytest.mark.parametrize("policy", ["skip", "raise", "rerun"])
def test_a_duplicate_that_is_not_sent_is_told_in_the_log_and_by_a_signal(
    caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    told: list[Any] = []

    def hear(key: str, holder: Holder, outcome: str, **_: Any) -> None:
        told.append((key, holder.task_id, outcome))

    signals.lock_conflict.connect(hear)
    with suppress(LockHeld):
        duplicate("cache+memory://", {}, lock_on_conflict=policy)
    signals.lock_conflict.disconnect(hear)

    ((key, standing, outcome),) = told
    (line,) = [each for each in caplog.messages if each.startswith("lock.conflict ")]
    assert outcome == "unpublished"
    assert line.startswith(f"lock.conflict key={key} task_id=None holder={standing} ")
    assert line.endswith("outcome=unpublished")


@pytest.mark.parametrize(("wanted", "outcome"), [("raise", "raised"), ("skip", "published"), ("run", "published")])
def test_a_call_that_the_store_does_not_answer_is_told_in_the_log(
    caplog: pytest.LogCaptureFixture, wanted: str, outcome: str
) -> None:
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "redis://127.0.0.1:1/0"

    @app.task(base=SingletonTask, lock_mode="until_executed", lock_on_store_error=wanted)
    def task() -> None: ...

    with suppress(StoreError):
        task.delay()

    (line,) = [each for each in caplog.messages if each.startswith("lock.unanswered ")]
    assert f" outcome={outcome}: " in line
