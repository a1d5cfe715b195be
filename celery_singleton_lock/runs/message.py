"""The message of a run: our notes on it, how it has come, and its way back to the broker.

Celery makes each header an attribute of the request. Sentry and Datadog write a header named `headers`, which replaces
all others in `request.headers`.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from celery import Task
from celery._state import get_current_task
from celery.app.task import Context
from celery.exceptions import Reject
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from celery_singleton_lock.definition.options import LockOptions, broker_delays
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Newest

if TYPE_CHECKING:
    from celery_singleton_lock.runs.run import Run

HEADER = "singleton_lock"
"""Our header: the time of publication, or all notes if there are more."""

ENTRY_HEADER = "beat_entry"
DUE_HEADER = "beat_due"
"""The headers that tell which entry a beat has sent, and when the entry was due."""

DELIVERY = "singleton_delivery"
"""The main process adds a `Delivery` to the fields of the message under this name, for the pool process."""


def text_of(task_id: Any) -> str:
    # Celery also takes a `uuid.UUID`, or a subclass of `str`, as a task id.
    return str.__str__(task_id) if isinstance(task_id, str) else str(task_id)


class Origin(NamedTuple):
    """The run that a call replaces by `replace()`."""

    key: str
    fence: int  # 0 without a lease
    published: int  # its `first_published`

    @property
    def had_lease(self) -> bool:
        return self.fence > 0


@dataclass
class Notes:
    """Our notes on a message. Times are microseconds since the epoch, or 0."""

    key: str = ""
    published: int = 0  # the first publication; by the store's clock with `rerun` and `replace`
    tries: int = 0  # requeues so far
    refused_at: int = 0  # the first refusal, by the store's clock
    is_copy: bool = False
    joins: str = ""  # the task id of the joined run
    joins_fence: int = 0  # the joined run's fence; before it begins, the store's time, which is smaller
    joins_since: int = 0  # older results of the joined task id do not count
    free_since: int = 0  # when the joined run was first seen without a lock, by the store's clock
    newest: Newest = ""
    is_bare: bool = False  # the message has no notes, so each delivery makes up another `published`
    unanswered: int = 0  # microseconds without an answer of the store, delays included
    origin: Origin | None = None
    task_id: str = ""  # whose notes these are: a body may hand its headers on to another call
    marked: bool = False  # published as queued
    rank: int = 0  # the turn's position in the line, as a time of the store
    waits_as_next: bool = False  # the successor, which waits until it can run

    @property
    def first_published(self) -> int:
        """When the call was published; for a replacement, when the replaced run's call was."""
        return (self.origin or self).published

    @property
    def left_something(self) -> bool:
        """The call may have a mark or a turn in the store."""
        return self.marked or bool(self.newest or self.rank)

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None, task_id: str | None = None) -> "Notes":
        """The notes in *headers*. Notes about another call than *task_id* do not count, unless *task_id* is None.

        Give an empty *task_id* for a new call: notes that a body has handed on to it do not count.

        Raises:
            ConfigurationError: The header has not our form.
        """
        # Without `__init__`, which would cost time: a field that is not set has the class's default.
        notes = cls.__new__(cls)
        written = headers.get(HEADER) if headers else None
        if type(written) is int:
            if task_id != "":
                notes.published = written
            return notes
        if written is None:
            return notes
        if type(written) is not dict or list(map(type, written.values())) != list(map(_TYPES.get, written)):
            written = _checked(written)
        vars(notes).update(written)
        is_of_another = task_id is not None and notes.task_id and notes.task_id != task_id
        return cls() if is_of_another and notes.task_id != str(task_id) else notes

    def header(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value or name not in _TYPES}

    def dated(self, now: Callable[[], int | None]) -> "Notes":
        """Add a missing time of publication. *now* asks the store, which may give none."""
        if not self.published:
            self.published = now() or time.time_ns() // 1000
            self.is_bare = True
        return self

    def of_the_call(self) -> "Notes":
        """The notes that a retry of the call keeps. It waits anew, so notes about this wait are left out."""
        kept = Notes.__new__(Notes)
        # Keep unknown notes, which a later version has written.
        known = vars(self).items()
        vars(kept).update((name, value) for name, value in known if name in _OF_THE_CALL or name not in _TYPES)
        return kept


_OF_THE_CALL = ("key", "published", "origin", "task_id")
_TYPES = {field.name: type(field.default) for field in fields(Notes)} | {"origin": Origin}
_TYPES_IN_ORIGIN = [str, int, int]


def _checked(written: Any) -> dict[str, Any]:
    if isinstance(written, Mapping):
        notes = dict(written)
        # A serializer may turn a tuple into a list.
        if type(origin := notes.get("origin")) is list and list(map(type, origin)) == _TYPES_IN_ORIGIN:
            notes["origin"] = Origin(*origin)
        # A note with the name of a method is not ours: it would hide that method.
        known = {name: value for name, value in notes.items() if name in _TYPES or hasattr(Notes, str(name))}
        if all(type(value) is _TYPES.get(name) for name, value in known.items()):
            return notes
    raise ConfigurationError(f"header {HEADER}={written!r:.200} is not ours; give a header of your own another name")


def with_notes(headers: Any, notes: Notes) -> dict[str, Any]:
    # Drop headers that are no mapping: Celery could not send them.
    if not (headers and isinstance(headers, Mapping)):
        return {HEADER: notes.header()}
    return {**{name: value for name, value in headers.items() if name != DELIVERY}, HEADER: notes.header()}


# The part of the visibility timeout in which surely nobody else gets the message.
_NEARLY = 0.9
# Seconds from the end of a body to its acknowledgement, on a busy machine.
_LATEST_ACKNOWLEDGEMENT = 10.0
# A field of a message is a publisher's header, unless `Context` has that attribute, or the field is one of these.
_CELERYS = frozenset({"lang", "task", "argsrepr", "kwargsrepr", "compression", DELIVERY, "singleton_state"})


Way = Literal["first", "copy", "item", "broadcast", "eager"]
"""How a run has come. `first`: by what seems the first delivery of its message. `copy`: by a delivery that may not be
the first. `item`: by the message of its map, starmap or chunks. `broadcast`: by a fanout exchange. `eager`: without a
message."""


class Delivery(NamedTuple):
    """What the main process of a worker sends to a pool process."""

    token: str = ""
    # When the main process received the message, on `clock()`. If unknown, infinite: `is_long_here` is then False.
    received: float = float("inf")
    sends_events: bool = False
    content_type: str | None = None
    # The publisher's headers, if one named `headers` hides the others.
    hidden: Mapping[str, Any] | None = None


class RequestState:
    """Our state on a request. Only its type tells it from a foreign header named `singleton_state`."""

    # The task `celery.map` or `celery.starmap` that calls an item.
    map: Any = None
    # The run that this eager call continues, after `retry()` or `replace()`. The call uses the lease of that run.
    origin: Origin | None = None
    # A pool may use one request object for several runs, one after the other.
    request_id: str | None = None

    @property
    def run(self) -> "Run | None":
        return None


_NO_DELIVERY = Delivery()


def request_of(task: Any) -> Context:
    """As `task.request`, but faster: Celery's property raises and catches an error."""
    try:
        request: Context = task.request_stack._local.__getattr__("stack")[-1]  # noqa: SLF001 (Celery's)
    except (AttributeError, IndexError):
        request = task.request
    return request


def state_of(request: Context) -> RequestState | None:
    state = getattr(request, "singleton_state", None)
    return state if isinstance(state, RequestState) and state.request_id == request.id else None


def run_of(request: Context) -> "Run | None":
    state = state_of(request)
    return state.run if state is not None else None


of_a_dead_run: ContextVar[Notes | None] = ContextVar("of_a_dead_run", default=None)
origin: ContextVar[Origin | None] = ContextVar("origin", default=None)


@contextmanager
def _inside(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def replacing(run: Origin) -> AbstractContextManager[None]:
    """Within this context, calls of the same key are published as replacements of this run."""
    return _inside(origin, run)


def origin_here() -> Origin | None:
    run = origin.get()
    if run is None:
        return None
    task = get_current_task()
    state = state_of(task.request) if task is not None else None
    # In eager mode a replacement's body runs inside `replacing`, but its own calls replace nothing.
    return run if state is None or state.origin is None else None


def for_a_dead_run(notes: Notes) -> AbstractContextManager[None]:
    """Within this context, a dead process's call is published again with the key in *notes*, without user code."""
    return _inside(of_a_dead_run, notes.of_the_call())


def notes_of(request: Context) -> Notes:
    known: Any = vars(request)
    if HEADER not in known and delivery_of(request).hidden is None:
        # In eager mode the headers are only in `request.headers`.
        known = request.headers
    return Notes.of(known, request.id)


def headers_of(request: Context) -> dict[str, Any]:
    """The headers of the caller and of `before_task_publish` receivers."""
    headers = delivery_of(request).hidden or request.headers
    return dict(headers) if isinstance(headers, Mapping) else {}


def hidden_in(message: Mapping[str, Any]) -> dict[str, Any] | None:
    if "headers" not in message:
        return None
    others = {name: value for name, value in message.items() if name not in _CELERYS and not hasattr(Context, name)}
    return {"headers": message["headers"], **others}


def delivery_of(request: Context) -> Delivery:
    delivery = getattr(request, DELIVERY, _NO_DELIVERY)
    if type(delivery) is not Delivery:
        # Anything but a tuple is a foreign header.
        delivery = tuple.__new__(Delivery, delivery) if type(delivery) is tuple else _NO_DELIVERY
        setattr(request, DELIVERY, delivery)
        if delivery.hidden is not None and not isinstance(request.headers, Mapping):
            # Celery cannot publish a retry if the headers are no mapping.
            request.headers = None
    return delivery


def way_of(task: Task, request: Context, notes: Notes, delivery: Delivery) -> Way:
    if request.called_directly:
        return "item"
    if request.is_eager:
        return "eager"
    if exchange := (request.delivery_info or {}).get("exchange"):
        exchanges = [queue.exchange for queue in task.app.amqp.queues.values()]
        if any(each.type == "fanout" and each.name == exchange for each in exchanges):
            return "broadcast"
    # An ETA may outlast the visibility timeout; the countdown of a requeue is far shorter.
    is_copy = (request.eta and not notes.tries) or has_copies(request, notes, delivery, task.lock_options)
    return "copy" if is_copy else "first"


def has_copies(request: Context, notes: Notes, delivery: Delivery, options: LockOptions) -> bool:
    was_delivered_before = notes.is_copy or (request.delivery_info or {}).get("redelivered")
    return bool(was_delivered_before or is_long_here(delivery, options))


def is_long_here(delivery: Delivery, options: LockOptions, *, late: bool = False) -> bool:
    """Whether the visibility timeout is nearly over, so that the broker may have delivered the message again.

    With *late*, also whether the timeout may end before the acknowledgement.
    """
    timeout = options.visibility_timeout
    age = clock() - delivery.received
    return age > timeout * _NEARLY or (late and age + _LATEST_ACKNOWLEDGEMENT > timeout)


@cache
def stores_retry_once(kind: Any) -> Callable[..., Any]:
    """Patch a backend class: Celery must store only one RETRY for a run. Return the unpatched `mark_as_retry`."""
    mark_as_retry: Callable[..., Any] = kind.mark_as_retry

    def once(backend: Any, *args: Any, **kwargs: Any) -> Any:
        run = run_of(kwargs.get("request"))
        is_stored = run is not None and run.stored_retry is not None
        return None if is_stored else mark_as_retry(backend, *args, **kwargs)

    kind.mark_as_retry = once
    return mark_as_retry


# Seconds to wait for a broker that restarts, and between two tries.
_LONGEST_RESTART = 60.0
_PAUSE = 0.5
# RabbitMQ's delayed delivery puts the bits of the countdown before a routing key.
_DELAY_IN_ROUTING_KEY = re.compile(r"^(?:[01]\.){28}")


def publish_again(run: "Run", delay: float, **notes: Any) -> Any:
    """Publish the run's message as it came, but *delay* seconds later and with these *notes* changed.

    Raises:
        Reject: The message cannot be published, and the broker delivers it again.
        Exception: The message cannot be published, and nobody delivers it again.
    """
    task = run.task
    request = run.request
    noted = copy(run.notes.dated(partial(run.store.time, run.key)))
    noted.key = run.key
    noted.task_id = run.task_id
    noted.tries += 1
    noted.newest = "next" if noted.newest else ""
    noted.is_copy = run.way == "copy"
    noted.unanswered = noted.rank = 0
    noted.waits_as_next = False
    vars(noted).update(notes)
    again = task.signature_from_request(
        request,
        retries=request.retries,
        # RabbitMQ delays by whole seconds.
        countdown=max(1, round(delay)) if broker_delays(task.app) else delay,
        headers=with_notes(headers_of(request), noted),
        retry=True,
        **_as_it_came(run),
    )
    give_up_at = clock() + _LONGEST_RESTART
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
        log.error("lock.publish_failed", "%s", error, key=run.key, task_id=request.id)
        if task.acks_late and isinstance(error, OperationalError):
            run.was_passed_on = True
            raise Reject(error, requeue=True) from error
        raise


def _as_it_came(run: "Run") -> dict[str, Any]:
    """Options of the message that Celery does not copy, and would choose anew."""
    request = run.request
    serializer = registry.type_to_name.get(run.delivery.content_type)
    # Celery 5.4 forgets `ignore_result`.
    ignores = request.get("ignore_result") or None
    chosen = {"serializer": serializer, "queue": _queue_of(run.task), "ignore_result": ignores}
    chosen |= {name: request.get(name) for name in ("compression", "argsrepr", "kwargsrepr")}
    return {name: value for name, value in chosen.items() if value is not None}


def _queue_of(task: Task) -> str | None:
    info = task.request.delivery_info or {}
    key = _DELAY_IN_ROUTING_KEY.sub("", info.get("routing_key") or "")
    for name, queue in task.app.amqp.queues.items():
        if queue.exchange.type != "fanout" and (queue.exchange.name, queue.routing_key) == (info.get("exchange"), key):
            return str(name)
    return None
