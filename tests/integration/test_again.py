"""A `__call__` before ours that catches the end of a run and tries again runs no second body."""

from typing import Any

import pytest
from celery import Celery, states

from celery_singleton_lock import ConfigurationError, SingletonTask
from tests.integration.test_task import held_by_somebody
from tests.tracing import traced


class TriesAgain(SingletonTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception:  # noqa: BLE001 (as users write it)
            return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("policy", ["raise", "skip", "reschedule", "rerun", "replace"])
def test_a_second_try_of_a_call_whose_key_is_held_does_not_run(app: Celery, policy: str) -> None:
    bodies, queue = [], app.conf.task_default_queue

    @app.task(base=TriesAgain, lock_on_conflict=policy, lock_wait_timeout=2)
    def body() -> None:
        bodies.append(1)

    release = held_by_somebody(app, body.lock_key_for())
    _, outcome = traced(body, delivery_info={"exchange": "", "routing_key": queue})
    release()

    assert bodies == []
    is_over = policy in ("raise", "skip")
    assert outcome.state == (states.FAILURE if is_over else states.IGNORED)
    if not is_over:
        with app.connection_for_read() as connection:
            assert connection.default_channel.queue_declare(queue, passive=True).message_count == 1


def test_a_second_try_after_the_body_is_refused(app: Celery) -> None:
    bodies = []

    @app.task(base=TriesAgain, name="stumbling")
    def body() -> None:
        bodies.append(1)
        raise OSError("the first time")

    _, outcome = traced(body)

    assert bodies == [1]
    assert isinstance(outcome.retval, ConfigurationError)
    assert "task stumbling: TriesAgain.__call__ calls" in str(outcome.retval)
    assert body.lock_holders() == []
