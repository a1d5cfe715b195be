"""How the message of a run has come, and the one place where we read and keep things on Celery's request.

A header is read from the top level of the message. Celery makes each of them an attribute of the request; its
`request.headers` is something else if the message has a header of the name `headers`, as Sentry and Datadog write it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.app.task import Context

from celery_singleton_lock.definition.options import LockOptions
from celery_singleton_lock.runs.notes import DELIVERY, HEADER, Notes, Origin
from celery_singleton_lock.stores.clock import clock

if TYPE_CHECKING:
    from celery_singleton_lock.runs.run import Run

# The part of the visibility timeout in which surely nobody else gets a message that was delivered here.
_NEARLY = 0.9
# Seconds from the end of a body until the broker has heard of it, on a busy machine.
_LATEST_ACKNOWLEDGEMENT = 10.0
# By default kombu looks every hundred seconds for messages whose timeout has passed.
_SWEEP = 120.0
# Names of a message that are Celery's, and no attributes of its `Context`.
_CELERYS = frozenset({"lang", "task", "argsrepr", "kwargsrepr", "compression", DELIVERY, "singleton_state"})


class Way(Enum):
    """How the message of a run has come."""

    FIRST = "by its first delivery, as far as anybody knows"
    COPY = "by a delivery that may not be its first"
    ITEM = "by the message of the map, starmap or chunks whose item it is"
    BROADCAST = "by a fanout exchange, to each queue"
    EAGER = "by none"


# By their own names, because a look into an enum costs a call before Python 3.12.
FIRST, COPY, ITEM, BROADCAST, EAGER = Way
CAN_BE_REQUEUED = FIRST, COPY
"""The others have no message of their own that could go back to the broker."""


@dataclass(slots=True)
class Delivery:
    """The data that the main process of a worker sends to a pool process."""

    token: str = ""
    # By the local clock; infinite, so never late, if no worker has sent it.
    received: float = float("inf")
    sends_events: bool = False
    content_type: str | None = None
    # The headers that its publisher has given it, if one of the name `headers` hides the others.
    hidden: Mapping[str, Any] | None = None


class RequestState:
    """Our state on a request, for one task id; a header of the same name has another type."""

    run: "Run | None" = None
    # Of a map, starmap or chunks whose item it is: its task id, and its name.
    item_of: str = ""
    map_name: str = ""
    # In eager mode: the run that this request replaces, or retries, under the lease of that run.
    origin: Origin | None = None
    # Seconds that the items of a map have waited in their places.
    waited: float = 0.0

    def __init__(self, request_id: str | None) -> None:
        # A pool may hand several runs the same request object, one after the other.
        self.request_id = request_id


_STATE = "singleton_state"
_NO_DELIVERY = Delivery()


def state_of(request: Context) -> RequestState | None:
    """What we keep on the request; None if there is nothing."""
    state = getattr(request, _STATE, None)
    return state if type(state) is RequestState and state.request_id == request.id else None


def state_for(request: Context) -> RequestState:
    """The same, made if there is nothing yet."""
    state = state_of(request)
    if state is None:
        state = vars(request)[_STATE] = RequestState(request.id)
    return state


def run_of(request: Context) -> "Run | None":
    """The run of the request, if it has one."""
    state = getattr(request, _STATE, None)
    return state.run if type(state) is RequestState and state.request_id == request.id else None


def notes_of(request: Context) -> Notes:
    """Our notes on the message of the request.

    Raises:
        ConfigurationError: The header is there, but not as we write it.
    """
    known: Any = vars(request)
    if HEADER not in known and delivery_of(request).hidden is None:
        # In eager mode nothing was sent, so its headers are here alone.
        known = request.headers
    return Notes.of(known, request.id)


def headers_of(request: Context) -> dict[str, Any]:
    """The headers that its caller, and others before it was sent, have given to the message."""
    hidden = delivery_of(request).hidden
    if hidden is not None:
        return dict(hidden)
    return dict(request.headers) if isinstance(request.headers, Mapping) else {}


def hidden_in(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """The headers of a message, if one of the name `headers` hides the others from a pool process."""
    if "headers" not in message:
        return None
    others = {name: value for name, value in message.items() if name not in _CELERYS and not hasattr(Context, name)}
    return {"headers": message["headers"], **others}


def delivery_of(request: Context) -> Delivery:
    """The data of this delivery from the main process, made once; empty if no worker has sent the run to its pool."""
    delivery = getattr(request, DELIVERY, _NO_DELIVERY)
    if type(delivery) is not Delivery:
        # A header of that name that somebody else wrote comes here only where no worker has replaced it.
        delivery = Delivery(*delivery) if type(delivery) is tuple else _NO_DELIVERY
        setattr(request, DELIVERY, delivery)
        if delivery.hidden is not None and not isinstance(request.headers, Mapping):
            # Celery could publish no retry with it.
            request.headers = None
    return delivery


def redelivered_within(options: LockOptions) -> float:
    """Seconds for which the broker may deliver a message again."""
    return options.visibility_timeout + _SWEEP


def is_later_attempt(request: Context, notes: Notes) -> bool:
    """The call was published by `retry()` or `replace()`, in a body that may not have ended yet."""
    return bool(
        request.retries
        # Each step of a chain that replaces a task is nested; only the one in the task's place has it as parent.
        or (request.replaced_task_nesting and request.parent_id in (None, request.id))
        or (notes.origin and notes.origin.fence)
    )


def way_of(task: Task, request: Context, notes: Notes, delivery: Delivery) -> Way:
    """How the message of a run has come; equal ids alone do not make a copy."""
    if request.called_directly:
        return ITEM
    if request.is_eager:
        return EAGER
    exchange = (request.delivery_info or {}).get("exchange")
    if exchange and _is_fanout(task, exchange):
        return BROADCAST
    # Our own countdowns are far shorter than any visibility timeout.
    is_copy = (request.eta and not notes.tries) or has_copies(request, notes, delivery, task.lock_options)
    return COPY if is_copy else FIRST


def _is_fanout(task: Task, exchange: str) -> bool:
    """Each queue gets a message by this exchange, so its siblings have the same task id and none is a copy."""
    queues = task.app.amqp.queues.values()
    return any(queue.exchange.type == "fanout" and queue.exchange.name == exchange for queue in queues)


def has_copies(request: Context, notes: Notes, delivery: Delivery, options: LockOptions) -> bool:
    """The message was delivered before, or is here for so long that the broker may have delivered it elsewhere."""
    return was_delivered_before(request, notes) or is_long_here(delivery, options)


def was_delivered_before(request: Context, notes: Notes) -> bool:
    return notes.is_copy or bool((request.delivery_info or {}).get("redelivered"))


def is_long_here(delivery: Delivery, options: LockOptions, *, late: bool = False) -> bool:
    """The message is here for so long that the broker may have delivered it elsewhere.

    With *late*, as seen from the moment at which the broker hears of the end of a body that ends now.
    """
    timeout = options.visibility_timeout
    age = clock() - delivery.received
    return age > timeout * _NEARLY or (late and age + _LATEST_ACKNOWLEDGEMENT > timeout)
