"""The message of a run: its way back to the broker, and the end of what its call has left in the store."""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from celery import Celery, Task, states
from celery.exceptions import Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.runs.delivery import delivery_of, headers_of, notes_of
from celery_singleton_lock.runs.notes import Notes, text_of, with_notes
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.store import Store

logger = logging.getLogger("celery_singleton_lock")

ENTRY_HEADER = "beat_entry"
DUE_HEADER = "beat_due"
"""The headers in which a beat notes which entry it has sent, and when the entry was due."""

# Seconds after which a broker that restarts is back; a job is worth the wait.
_PATIENCE = 60.0
_PAUSE = 0.5
# Seconds for which to try to end a mark.
_MARK_PATIENCE = 60.0
# The shortest time that the store knows.
_A_MOMENT = 0.001
# RabbitMQ's delayed delivery puts the bits of the countdown before a routing key.
_DELAY_IN_ROUTING_KEY = re.compile(r"^(?:[01]\.){28}")


def seconds_until(task: Task, moment: Any) -> float:
    """Seconds from now until *moment*, in any form that `apply_async` takes or a message has."""
    if isinstance(moment, int | float):
        return float(moment)
    until: timedelta = maybe_make_aware(maybe_iso8601(moment), task.app.timezone) - datetime.now(UTC)
    return until.total_seconds()


def until_expired(task: Task, expires: Any) -> float:
    """Seconds from now in which the call may still begin; at least a moment, and infinite without `expires`."""
    return float("inf") if expires is None else max(_A_MOMENT, seconds_until(task, expires))


def send_again(task: Task, key: str, delay: float, **notes: Any) -> Any:
    """Publish the message as it came, to come again.

    Arguments:
        task: The task whose present request is to come again.
        key: The key of its run, under which it comes again.
        delay: Seconds until then.
        notes: The fields to write on the message beside those that are there.

    Raises:
        Reject: It cannot be published, and the broker will deliver it again by itself.
        Exception: It cannot be published, and was acknowledged already.
    """
    request = task.request
    known = notes_of(request)
    again = task.signature_from_request(
        request,
        retries=request.retries,
        countdown=_possible(task, delay),
        headers=with_notes(
            headers_of(request),
            replace(
                known.dated(),
                **{
                    "key": key,
                    "task_id": text_of(request.id or ""),
                    "tries": known.tries + 1,
                    "unanswered": 0,
                    **notes,
                },
            ),
        ),
        retry=True,
        **_as_it_came(task),
    )
    give_up_at = clock() + _PATIENCE
    try:
        while True:
            try:
                again.apply_async()
                return again
            except OperationalError:
                if clock() > give_up_at:
                    raise
                time.sleep(_PAUSE)
    except Exception as error:
        logger.error("lock.publish_failed key=%s task_id=%s: %s", key, request.id, error)
        if task.acks_late and isinstance(error, OperationalError):
            raise Reject(error, requeue=True) from error
        raise


def _as_it_came(task: Task) -> dict[str, Any]:
    """The options of the message that neither Celery nor the task would choose again."""
    request = task.request
    serializer = registry.type_to_name.get(delivery_of(request).content_type)
    # Celery 5.4 forgets the last of these.
    chosen = {"serializer": serializer, "queue": _queue_of(task), "ignore_result": request.get("ignore_result") or None}
    chosen |= {name: request.get(name) for name in ("compression", "argsrepr", "kwargsrepr")}
    return {name: value for name, value in chosen.items() if value is not None}


def _queue_of(task: Task) -> str | None:
    """The queue it came by, if that is known; a delayed delivery changes the routing key."""
    info = task.request.delivery_info or {}
    key = _DELAY_IN_ROUTING_KEY.sub("", info.get("routing_key") or "")
    for name, queue in task.app.amqp.queues.items():
        if queue.exchange.type != "fanout" and (queue.exchange.name, queue.routing_key) == (info.get("exchange"), key):
            return str(name)
    return None


def _possible(task: Task, delay: float) -> float:
    """*delay*, or whole seconds where RabbitMQ itself delays the message."""
    try:
        from celery.utils.quorum_queues import detect_quorum_queues  # noqa: PLC0415 (new in Celery 5.5)
    except ImportError:
        return delay
    driver = task.app.producer_pool.connections.connection.transport.driver_type
    return max(1, round(delay)) if detect_quorum_queues(task.app, driver)[0] else delay


# What a call has left in the store, to be ended once its message has ended for good.


def unmark(store: Store, key: str, task_id: str, *, quiet: bool = True, may_arrive: bool = False) -> None:
    """End it now, or in the background if the store does not answer; see `PendingRelease` for *may_arrive*."""
    try:
        store.unmark(key, task_id, quiet=quiet)
        is_answered = True
    except StoreError:
        is_answered = False
    if not is_answered or may_arrive:
        unmark_later(store, key, task_id, quiet=quiet, may_arrive=may_arrive)


def unmark_later(store: Store, key: str, task_id: str, *, quiet: bool = True, may_arrive: bool = False) -> None:
    """End it in the background: a main process waits for no store."""
    end = partial(store.unmark, key, task_id, quiet=quiet)
    background.submit(PendingRelease(store, key, task_id, _MARK_PATIENCE, end, may_arrive=may_arrive))


def unmark_unread(app: Celery, headers: Mapping[str, Any]) -> None:
    """In the background, end the marks of a call whose message a worker has thrown away unread.

    Raises:
        Exception: Any error that headers can cause that are not a task's, or not ours.
    """
    notes = Notes.of(headers, headers.get("id"))
    if notes.key and notes.left_something:
        unmark_later(store_of(app), notes.key, str(headers["id"]))


def unmark_unstarted(task: Task, state: str | None, retval: Any) -> None:
    """End it for the present request, which was refused before it asked for its lock, for example by `before_start`."""
    request, is_requeued = task.request, isinstance(retval, Reject) and retval.requeue and task.acks_late
    if state == states.RETRY or is_requeued:
        return
    try:
        notes = Notes() if request.called_directly else notes_of(request)
    except ConfigurationError:
        # Its result tells already.
        return
    if notes.key and notes.left_something:
        unmark(store_of(task.app), notes.key, text_of(request.id))
