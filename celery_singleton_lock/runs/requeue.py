"""The one way back to the broker: a call that cannot run now is requeued as it came."""

import logging
import re
import time
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery, Task
from celery.exceptions import Reject
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from celery_singleton_lock.log import log
from celery_singleton_lock.runs.message import headers_of, with_notes
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.clock import clock

try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:
    # Celery 5.4 has none.
    detect_quorum_queues = None

_delaying: WeakKeyDictionary["Celery[Any]", bool] = WeakKeyDictionary()

# Seconds to wait for a broker that restarts.
_PATIENCE = 60.0
_PAUSE = 0.5
# RabbitMQ's delayed delivery puts the bits of the countdown before a routing key.
_DELAY_IN_ROUTING_KEY = re.compile(r"^(?:[01]\.){28}")


def publish_again(run: Run, delay: float, **notes: Any) -> Any:
    """Publish the run's message as it came, to come again after *delay* seconds, with some of its *notes* changed.

    The published message continues the call, under the same key.

    Raises:
        Reject: The message cannot be published, and the broker delivers it again.
        Exception: The message cannot be published, and was acknowledged.
    """
    task = run.task
    request = run.request
    dated = run.notes.dated(partial(run.store.time, run.key))
    noted = {
        "key": run.key,
        "task_id": run.task_id,
        "tries": dated.tries + 1,
        "newest": "next" if dated.newest else "",
        "is_copy": run.way == "copy",
        "unanswered": 0,
        "rank": 0,
        "waits_as_next": False,
        **notes,
    }
    again = task.signature_from_request(
        request,
        retries=request.retries,
        # RabbitMQ delays by whole seconds.
        countdown=max(1, round(delay)) if broker_delays(task.app) else delay,
        headers=with_notes(headers_of(request), replace(dated, **noted)),
        retry=True,
        **_as_it_came(run),
    )
    give_up_at = clock() + _PATIENCE
    try:
        while True:
            try:
                again.apply_async()
                run.was_passed_on = True
                return again
            except OperationalError:
                if clock() > give_up_at:
                    raise
                time.sleep(_PAUSE)
    except Exception as error:
        log.write(logging.ERROR, "lock.publish_failed", "%s", error, key=run.key, task_id=request.id)
        if task.acks_late and isinstance(error, OperationalError):
            run.was_passed_on = True
            raise Reject(error, requeue=True) from error
        raise


def _as_it_came(run: Run) -> dict[str, Any]:
    """The options of the message that neither Celery nor the task would choose again."""
    request = run.request
    serializer = registry.type_to_name.get(run.delivery.content_type)
    # Celery 5.4 forgets `ignore_result`.
    ignores = request.get("ignore_result") or None
    chosen = {"serializer": serializer, "queue": _queue_of(run.task), "ignore_result": ignores}
    chosen |= {name: request.get(name) for name in ("compression", "argsrepr", "kwargsrepr")}
    return {name: value for name, value in chosen.items() if value is not None}


def _queue_of(task: Task) -> str | None:
    """The queue by which the message came, if it is known. A delayed delivery changes the routing key."""
    info = task.request.delivery_info or {}
    key = _DELAY_IN_ROUTING_KEY.sub("", info.get("routing_key") or "")
    for name, queue in task.app.amqp.queues.items():
        if queue.exchange.type != "fanout" and (queue.exchange.name, queue.routing_key) == (info.get("exchange"), key):
            return str(name)
    return None


def broker_delays(app: Celery) -> bool:
    """RabbitMQ itself delays messages, so a message is in no worker before its time, and cannot be woken."""
    if app not in _delaying:
        driver = app.producer_pool.connections.connection.transport.driver_type
        _delaying[app] = detect_quorum_queues is not None and bool(detect_quorum_queues(app, driver)[0])
    return _delaying[app]
