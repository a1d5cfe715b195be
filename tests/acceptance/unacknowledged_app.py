"""The app of workers whose acknowledgements fail where a test says so, as if the connection broke at that moment."""

from typing import Any

from celery.signals import worker_init
from kombu.message import Message

from tests.acceptance.combined_app import app, recorder, task_with
from tests.recorder import Recorder

__all__ = ["app"]

coming_again = task_with("late-coming-again", acks_late=True, lock_on_conflict="reschedule")


def lose_an_acknowledgement(recorder: Recorder, task_id: str) -> None:
    """The next one of this task is lost."""
    recorder._client.set(f"loses:{task_id}", "an acknowledgement")


def has_lost_it(recorder: Recorder, task_id: str) -> bool:
    return not recorder._client.exists(f"loses:{task_id}")


@worker_init.connect
def acknowledgements_may_fail(**_: Any) -> None:
    plain = Message.ack

    def acknowledge(message: Message, multiple: bool = False) -> None:
        if recorder._client.getdel(f"loses:{message.headers.get('id')}"):
            raise ConnectionError("the connection is lost")
        plain(message, multiple)

    Message.ack = acknowledge
