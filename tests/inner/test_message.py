"""What becomes of a message that cannot be published for a minute: a real minute would be too long."""

from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Reject
from kombu.exceptions import OperationalError

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.runs import message


@pytest.mark.parametrize(
    ("error", "acks_late", "raised"),
    [
        (OperationalError("down"), True, Reject),
        (OperationalError("down"), False, OperationalError),
        (ValueError("too long"), True, ValueError),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_published_is_delivered_again_if_the_broker_still_has_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, acks_late: bool, raised: Any
) -> None:
    app = Celery("messages", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://messages"

    @app.task(base=SingletonTask, shared=False, acks_late=acks_late)
    def task() -> None: ...

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(message, "_PATIENCE", 0)
    monkeypatch.setattr(app, "send_task", fail)
    info = {"exchange": "celery", "routing_key": "celery", "redelivered": False}
    task.request_stack.push(Context({"id": "me", "called_directly": False, "delivery_info": info}, args=(), kwargs={}))

    with pytest.raises(raised) as seen:
        message.send_again(task, "key", 1)
    assert getattr(seen.value, "requeue", True)
