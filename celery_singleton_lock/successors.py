"""The one run that comes after the present one, and the arguments it runs with."""

import base64
import json
from typing import TYPE_CHECKING, Any

from kombu.serialization import dumps, loads, prepare_accept_content

from celery_singleton_lock.again import history
from celery_singleton_lock.stores.records import Succession

if TYPE_CHECKING:
    from celery_singleton_lock.task import SingletonTask


def succession_for(task: "SingletonTask", args: Any, kwargs: Any) -> Succession | None:
    """What the task's `lock_on_conflict` has to ask the store for, where the lock is held."""
    policy = task.lock_options.on_conflict
    if policy not in ("rerun", "replace") or task.request.is_eager:
        return None
    if policy == "rerun" and task.request.retries:
        # An attempt at a run that has begun is no call that could be merged into the next.
        return None
    asked_at = history(task.request).get("asked_at", 0)
    arguments = "" if asked_at or policy == "replace" else pack(task, args, kwargs)
    return Succession(policy, arguments, asked_at)


def pack(task: "SingletonTask", args: Any, kwargs: Any) -> str:
    """Arguments as text, in the serialiser of the task's messages."""
    content_type, encoding, payload = dumps((list(args), kwargs), serializer=task.serializer)
    data = payload.encode() if isinstance(payload, str) else payload
    return json.dumps([content_type, encoding, base64.b64encode(data).decode()])


def unpack(task: "SingletonTask", text: str) -> tuple[Any, Any]:
    """The arguments in a text of `pack`.

    Raises:
        ContentDisallowed: The app does not accept the serialiser they were written with.
    """
    content_type, encoding, data = json.loads(text)
    accept = prepare_accept_content(task.app.conf.accept_content)
    args, kwargs = loads(base64.b64decode(data), content_type, encoding, accept=accept)
    return args, kwargs
