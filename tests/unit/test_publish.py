"""How long a call counts as queued."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, uuid

from celery_singleton_lock import LockHeld, SingletonTask

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
