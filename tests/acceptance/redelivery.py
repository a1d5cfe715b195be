"""A Redis broker that delivers again what was not acknowledged within two seconds."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.servers import Server

VISIBILITY = 2


@contextmanager
def impatient(app: Any) -> Iterator[None]:
    """Messages of *app* that are older come again, whichever kombu its workers have."""
    options = dict(app.conf.broker_transport_options)
    app.conf.broker_transport_options = {**options, "visibility_timeout": VISIBILITY}
    over = threading.Event()
    sweeper = threading.Thread(target=_sweep, args=(app, over))
    sweeper.start()
    try:
        yield
    finally:
        over.set()
        sweeper.join()
        app.conf.broker_transport_options = options


def _sweep(app: Any, over: threading.Event) -> None:
    """Do each second what a worker does each hundred seconds with a kombu before 5.7, which has no option for it."""
    with app.connection_for_read() as connection:
        while not over.wait(1):
            connection.default_channel.qos.restore_visible(interval=1)


def messages_of(server: Server, task_id: str, queue: str = "celery") -> int:
    """How many messages of this task the broker has, queued or not acknowledged."""
    with server.client() as broker:
        queued = [json.loads(message) for message in broker.lrange(queue, 0, -1)]
        taken = [json.loads(entry)[0] for entry in broker.hvals("unacked")]
    return sum(message["headers"]["id"] == task_id for message in [*queued, *taken])
