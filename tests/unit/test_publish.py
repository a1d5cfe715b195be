"""How long a call counts as queued."""

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


@pytest.mark.parametrize(
    ("options", "longer"),
    [
        ({}, 0),
        ({"countdown": 60}, 60),
        ({"expires": 90.5}, 90.5),
        ({"countdown": 60, "expires": 90}, 90),
        ({"eta": datetime.now(UTC) + timedelta(days=1)}, 24 * HOUR),
        ({"eta": datetime.now(UTC).replace(tzinfo=None) + timedelta(days=1)}, 24 * HOUR),  # the app's zone: UTC
        ({"eta": datetime.now(UTC) - timedelta(days=1)}, 0),
        ({"expires": (datetime.now(UTC) + timedelta(days=1)).isoformat()}, 24 * HOUR),
    ],
)
def test_a_mark_lasts_until_the_message_may_run_and_then_as_long_as_lock_queue_ttl(
    options: dict[str, Any], longer: float
) -> None:
    assert lasts(options) == pytest.approx(HOUR + longer, abs=60 if longer == 24 * HOUR else 5)


def test_the_expiry_of_the_task_counts_as_well() -> None:
    assert lasts({}, expires=90) == pytest.approx(HOUR + 90, abs=5)
    assert lasts({"expires": 30}, expires=90) == pytest.approx(HOUR + 30, abs=5)
