"""The one way back to the broker: a call that cannot run now is requeued, as it came, and asks again later."""

import logging
import random
import re
import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from celery import Celery, Task
from celery.exceptions import Reject
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from celery_singleton_lock.definition.options import LockOptions
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.endings import until_expired
from celery_singleton_lock.runs.message import delivery_of, headers_of, notes_of, text_of, with_notes
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.clock import clock

try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:
    # Celery 5.4 has none.
    detect_quorum_queues = None

_delaying: WeakKeyDictionary["Celery[Any]", bool] = WeakKeyDictionary()


class Backoff(NamedTuple):
    """Seconds until a call asks again: twice as long each time, up to the longest, and to a third of its ttl."""

    first: float
    longest: float
    # After a few refusals a call asks more rarely, so that any number of waiting calls is a bounded load.
    is_patient: bool = False


REFUSED = Backoff(0.25, 2.0, is_patient=True)
# The next free place is for this call.
NEXT = Backoff(0.25, 2.0)
# The call looks for the result of another run, whose end is not near.
JOINED = Backoff(1.0, 1.0, is_patient=True)
# Another delivery of the message runs.
PARKED = Backoff(0.25, 2.0)
# `retry()` and `replace()` publish before their body has ended, usually by milliseconds.
CONTINUED = Backoff(0.05, 2.0)

# Refusals after which a patient call asks more rarely.
_A_FEW = 8
# Seconds to wait for a broker that restarts.
_PATIENCE = 60.0
_PAUSE = 0.5
# RabbitMQ's delayed delivery puts the bits of the countdown before a routing key.
_DELAY_IN_ROUTING_KEY = re.compile(r"^(?:[01]\.){28}")


def delay_of(run: Run, backoff: Backoff, expires_in: float = float("inf")) -> float:
    """Seconds until the run asks again, hardly more than *expires_in*, after which its key may be free."""
    tries = run.notes.tries
    longest = backoff.longest
    if backoff.is_patient:
        longest *= 2.0 ** min(max(0, tries - _A_FEW), _A_FEW)
    delay = jittered(run.options, min(longest, run.options.ttl / 3, backoff.first * 2 ** min(tries, 10)))
    return min(delay, max(backoff.first / 5, expires_in))


def delay_in_line(task: Task, expires: Any, left: float) -> float:
    """Seconds until a message asks again if its turn is not woken before; at most the *left* seconds of its wait."""
    # A worker discards an expired message only when its countdown ends.
    return min(jittered(task.lock_options, float("inf")), left, until_expired(task, expires))


def jittered(options: LockOptions, delay: float) -> float:
    """A random time between half of *delay* and *delay*, and at most a quarter of the visibility timeout."""
    # The message stays unacknowledged until then. Near the visibility timeout it would be delivered a second time.
    delay = min(delay, options.visibility_timeout / 4)
    return random.uniform(delay / 2, delay)


def publish_again(run: Run, delay: float, **notes: Any) -> Any:
    """Publish the message as it came.

    Arguments:
        run: The run of the message. The published message continues the call, under the same key.
        delay: Seconds until the message comes again.
        notes: Fields to change in the notes of the message.

    Raises:
        Reject: The message cannot be published, and the broker delivers it again.
        Exception: The message cannot be published, and was acknowledged.
    """
    task = run.task
    request = run.request
    dated = notes_of(request).dated(partial(run.store.time, run.key))
    noted = {
        "key": run.key,
        "task_id": text_of(request.id or ""),
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
        **_as_it_came(task),
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


def _as_it_came(task: Task) -> dict[str, Any]:
    """The options of the message that neither Celery nor the task would choose again."""
    request = task.request
    serializer = registry.type_to_name.get(delivery_of(request).content_type)
    # Celery 5.4 forgets `ignore_result`.
    chosen = {"serializer": serializer, "queue": _queue_of(task), "ignore_result": request.get("ignore_result") or None}
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
