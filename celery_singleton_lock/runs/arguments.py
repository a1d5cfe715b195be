"""The arguments of a call as text, for the run that is to carry them."""

import base64
import json
import logging
from typing import Any

from kombu.exceptions import ContentDisallowed
from kombu.serialization import dumps, loads, prepare_accept_content, registry

from celery_singleton_lock.runs.message import delivery_of
from celery_singleton_lock.runs.run import Run

logger = logging.getLogger("celery_singleton_lock")


def pack(run: Run) -> str:
    """The arguments, in the serialiser of the message."""
    serializer = registry.type_to_name.get(delivery_of(run.request).content_type) or run.task.serializer
    content_type, encoding, payload = dumps((list(run.args), run.kwargs), serializer=serializer)
    data = payload.encode() if isinstance(payload, str) else payload
    return json.dumps([content_type, encoding, base64.b64encode(data).decode()])


def unpack(run: Run, text: str) -> tuple[Any, Any]:
    """The arguments in a text of `pack`.

    Raises:
        ContentDisallowed: The app does not accept the serialiser they were written with.
    """
    content_type, encoding, data = json.loads(text)
    accept = prepare_accept_content(run.task.app.conf.accept_content)
    try:
        args, kwargs = loads(base64.b64decode(data), content_type, encoding, accept=accept)
    except ContentDisallowed:
        event = "lock.unread key=%s task_id=%s: merged arguments are in %s; they stay for the next run"
        logger.error(event, run.key, run.task_id, content_type)
        raise
    return args, kwargs
