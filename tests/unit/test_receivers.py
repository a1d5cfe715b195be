"""Receivers of messages that a worker rejects or does not know."""

from typing import Any

import pytest
from celery import Celery
from celery.signals import task_rejected, task_unknown
from celery.utils.objects import Bunch

from celery_singleton_lock import SingletonTask
from tests.unit.conftest import headers_of


def damaged(headers: dict[str, Any]) -> list[Any]:
    """The same with each of them, and each entry of those that have some, replaced or taken away."""
    odds: list[Any] = [None, [], 1, "mine", {}]
    found: list[Any] = [None, [], {}]
    for name, value in headers.items():
        found.append({each: other for each, other in headers.items() if each != name})
        found += [{**headers, name: odd} for odd in odds]
        if isinstance(value, dict):
            found += [{**headers, name: {**value, entry: odd}} for entry in value for odd in odds]
    return found


@pytest.mark.parametrize("signal", [task_unknown, task_rejected], ids=["unknown", "rejected"])
def test_whatever_a_message_carries_the_consumer_goes_on(app: Celery, signal: Any) -> None:
    @app.task(base=SingletonTask, lock_mode="until_executed")
    def task() -> None: ...

    consumer = Bunch(app=app)
    for headers in damaged(headers_of(task, task.delay)[0]):
        # As the consumer of a worker sends it.
        answers = signal.send(sender=consumer, message=Bunch(headers=headers), exc=None)

        assert [answer for _, answer in answers if isinstance(answer, Exception)] == [], headers
