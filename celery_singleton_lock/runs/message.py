"""The message of a run: the notes that we write on it, and its way back to the broker."""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from celery import Celery, Task, states
from celery.app.task import Context
from celery.exceptions import Reject
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.background import PendingRelease, background
from celery_singleton_lock.options import LockOptions
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.store import Store

logger = logging.getLogger("celery_singleton_lock")

HEADER = "singleton_lock"
"""The header of our notes: the time of publication, or the notes if there is more to say."""

DELIVERY = "singleton_delivery"
"""The name under which the main process sends a pool process the facts of this delivery, beside the message."""

ENTRY_HEADER = "beat_entry"
DUE_HEADER = "beat_due"
"""The headers in which a beat notes which entry it has sent, and when the entry was due."""

# The part of the visibility timeout in which surely nobody else gets a message that was delivered here.
_NEARLY = 0.9
# Seconds from the end of a body until the broker has heard of it, on a busy machine.
_LATEST_ACKNOWLEDGEMENT = 10.0
# By default kombu looks every hundred seconds for messages whose timeout has passed.
_SWEEP = 120.0
# Seconds after which a broker that restarts is back; a job is worth the wait.
_PATIENCE = 60.0
_PAUSE = 0.5
# Seconds for which to try to end a mark.
_MARK_PATIENCE = 60.0
# The shortest time that the store knows.
_A_MOMENT = 0.001
# RabbitMQ's delayed delivery puts the bits of the countdown before a routing key.
_DELAY_IN_ROUTING_KEY = re.compile(r"^(?:[01]\.){28}")


class Delivery(NamedTuple):
    """The data that the main process of a worker sends to a pool process."""

    token: str = ""
    # By the local clock; infinite, so never late, if no worker has sent it.
    received: float = float("inf")
    sends_events: bool = False
    content_type: str | None = None


def text_of(task_id: Any) -> str:
    """*task_id* as the text that the store has: Celery takes a `uuid.UUID`, or a subclass of `str`, as well."""
    return str.__str__(task_id) if isinstance(task_id, str) else str(task_id)


def delivery_of(request: Context) -> Delivery:
    """The data of this delivery from the main process, made once; empty if no worker has sent the run to its pool."""
    delivery = vars(request).get(DELIVERY, _NO_DELIVERY)
    if type(delivery) is not Delivery:
        delivery = vars(request)[DELIVERY] = Delivery(*delivery)
    return delivery


_NO_DELIVERY = Delivery()


@dataclass
class Notes:
    """The notes that we have written on a message. Times are in microseconds since the epoch; 0 is none."""

    key: str = ""
    published: int = 0  # first, whoever publishes it again
    tries: int = 0  # how many times it has come again
    since: int = 0  # its first refusal, by the store's clock
    is_copy: bool = False  # it may have been delivered before
    joins: str = ""  # the task id of the run that it has joined
    joins_fence: int = 0  # of that run, when it was seen last; less than it will have if it has yet to run
    joins_since: int = 0  # the publication of that run, if an earlier call with its task id has left a result
    free_since: int = 0  # when that run was first seen without a lock, by the store's clock
    asked: bool = False  # it has asked to be the run that comes next
    is_bare: bool = False  # it came without notes at first, so its other deliveries do not know `published`
    unanswered: int = 0  # microseconds that it has spent asking the store in vain, up to its next delivery
    continues: int = 0  # the fence of the run that it replaces
    task_id: str = ""  # of the call they were written for: a body may hand its headers on to another call
    marked: bool = False  # it was published as queued, even if its task has another mode by now
    continues_from: int = 0  # the publication of the run that it replaces

    @property
    def left_something(self) -> bool:
        """Its call may have left something in the store that is to end with its message."""
        return self.marked or self.asked

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None, task_id: str | None = None) -> "Notes":
        """The notes in the headers of a message, if they are about the call with this id.

        Arguments:
            headers: Of the message.
            task_id: Of the call; None for any, empty for a new call, of which no headers can know anything.

        Raises:
            ConfigurationError: The header is there, but not as we write it.
        """
        # Fields that are not written keep the default of the class, because most have only a few.
        notes = cls.__new__(cls)
        written = (headers or {}).get(HEADER)
        if written is None:
            return notes
        if type(written) is int:
            if task_id != "":
                notes.published = written
            return notes
        if not (isinstance(written, Mapping) and list(map(type, written.values())) == list(map(_TYPES.get, written))):
            advice = "give a header of your own another name"
            raise ConfigurationError(f"header {HEADER}={written!r:.200} is not ours; {advice}")
        vars(notes).update(written)
        return cls() if task_id is not None and notes.task_id not in ("", task_id, str(task_id)) else notes

    def header(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value}

    def dated(self) -> "Notes":
        """The same with a time of publication, which is now if there is none."""
        return self if self.published else replace(self, published=time.time_ns() // 1000, is_bare=True)

    def of_the_call(self) -> "Notes":
        """The notes that stay once a body has begun: a retry of the body begins a new wait."""
        return Notes(self.key, self.published, continues_from=self.continues_from, task_id=self.task_id)


_OF_EVERY_CALL = {"task_id", "key", "published"}
_TYPES = {field.name: type(field.default) for field in fields(Notes)}


def message_of(notes: Notes) -> int:
    """What distinguishes messages of one task id, which may be used again: the time of publication of the call."""
    return 0 if notes.is_bare else notes.published


def with_notes(headers: Mapping[str, Any] | None, notes: Notes) -> dict[str, Any]:
    # Celery takes every option that it does not know for a header.
    kept = {name: value for name, value in (headers or {}).items() if name != DELIVERY}
    return {**kept, HEADER: notes.header()}


def redelivered_within(options: LockOptions) -> float:
    """Seconds for which the broker may deliver a message again."""
    return options.visibility_timeout + _SWEEP


def hands_over(request: Context) -> bool:
    """A run continues under this id: `retry()` and `replace()` publish before their own body has ended."""
    # Each step of a chain that replaces a task is marked so; only the one in the task's place has it as parent.
    is_in_its_place = request.parent_id in (None, request.id)
    return bool(request.retries or (request.replaced_task_nesting and is_in_its_place))


def is_unusual(request: Context, notes: "Notes", delivery: Delivery, options: LockOptions) -> bool:
    """The message has come by an exchange, again, late or for later, or goes on with a task; most have not."""
    known = vars(request)
    info = known.get("delivery_info") or {}
    return bool(
        known.get("is_eager")
        or known.get("retries")
        or known.get("eta")
        or known.get("replaced_task_nesting")
        or known.get("lock_item")
        or info.get("redelivered")
        or info.get("exchange")
        or not delivery.token
        or not vars(notes).keys() <= _OF_EVERY_CALL
        or clock() - delivery.received > options.visibility_timeout * _NEARLY
    )


def seconds_until(task: Task, moment: Any) -> float:
    """Seconds from now until *moment*, in any form that `apply_async` takes or a message has."""
    if isinstance(moment, int | float):
        return float(moment)
    until: timedelta = maybe_make_aware(maybe_iso8601(moment), task.app.timezone) - datetime.now(UTC)
    return until.total_seconds()


def until_expired(task: Task, expires: Any) -> float:
    """Seconds from now in which the call may still begin; at least a moment, and infinite without `expires`."""
    return float("inf") if expires is None else max(_A_MOMENT, seconds_until(task, expires))


def is_broadcast(task: Task, request: Context) -> bool:
    """The message came by a fanout exchange, so its siblings have the same task id and none is a copy."""
    exchange = (request.delivery_info or {}).get("exchange")
    if not exchange:
        return False
    queues = task.app.amqp.queues.values()
    return any(queue.exchange.type == "fanout" and queue.exchange.name == exchange for queue in queues)


def may_be_copy(task: Task, request: Context, notes: Notes) -> bool:
    """The message may be delivered more than once; equal ids alone do not make a copy."""
    if request.is_eager or is_broadcast(task, request):
        return False
    # Our own countdowns are far shorter than any visibility timeout.
    delivery, options = delivery_of(request), task.lock_options
    return has_copies(request, notes, delivery, options) or bool(request.eta and not notes.tries)


def has_copies(request: Context, notes: Notes, delivery: Delivery, options: LockOptions, *, late: bool = False) -> bool:
    """The message was delivered before, or is here for so long that the broker may have delivered it elsewhere.

    With *late*, as seen from the moment at which the broker hears of the end of a body that ends now.
    """
    age = clock() - delivery.received
    if age > options.visibility_timeout * _NEARLY or (
        late and age + _LATEST_ACKNOWLEDGEMENT > options.visibility_timeout
    ):
        return True
    return notes.is_copy or bool((request.delivery_info or {}).get("redelivered"))


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
    known = Notes.of(request.headers, request.id)
    again = task.signature_from_request(
        request,
        retries=request.retries,
        countdown=_possible(task, delay),
        headers=with_notes(
            request.headers,
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
        notes = Notes() if request.called_directly else Notes.of(request.headers, request.id)
    except ConfigurationError:
        # Its result tells already.
        return
    if notes.key and notes.left_something:
        unmark(store_of(task.app), notes.key, text_of(request.id))
