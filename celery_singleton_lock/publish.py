"""Publishing a call: attach our notes, and in a queue mode look for an equal call first."""

import logging
import os
import socket
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery import Task, states, uuid
from celery._state import get_current_task
from celery.app.routes import MapRoute
from celery.result import AsyncResult, EagerResult

from celery_singleton_lock import signals
from celery_singleton_lock.definition.keys import are_plain, label_of
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.errors import ConfigurationError, SingletonLockError, StoreError, StoreRefused
from celery_singleton_lock.leases.counters import count, note
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.endings import (
    CallRevoked,
    final_result,
    has_ended,
    has_result,
    seconds_until,
    unmark,
    until_expired,
    why_unreadable,
)
from celery_singleton_lock.runs.message import (
    DUE_HEADER,
    Notes,
    Origin,
    notes_of,
    run_of,
    state_of,
    text_of,
    with_notes,
)
from celery_singleton_lock.runs.run import Phase, Run
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Facts, Holder, PublishMode

Send = Callable[..., Any]

# Seconds in which a silent store is not asked again, so a web page that sends ten calls waits for it once.
_MEMORY = 1.0
# Keyed by what can fail on its own: a store, or a server of a cluster.
_silences: WeakKeyDictionary[Hashable, tuple[float, StoreError]] = WeakKeyDictionary()

# Options of calls that somebody waits for: members of a canvas, callbacks, retries, and calls with callbacks.
_WAITED_FOR = ("group_id", "chord", "chain", "root_id", "parent_id", "link", "link_error", "retries")
# Celery publishes a call with one of these for somebody else. An error here would let a canvas or the result of a retry
# hang, so the worker meets the error, and the call fails there.
_TOLD_BY_A_RESULT = ("group_id", "chord", "parent_id", "retries")

# Options of a call that override the destination given by its task and the settings.
_DESTINATIONS = {"queue", "exchange", "routing_key"}

_of_a_dead_run: ContextVar[Notes | None] = ContextVar("of_a_dead_run", default=None)
_origin: ContextVar[Origin | None] = ContextVar("origin", default=None)


@contextmanager
def _inside(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def replacing(origin: Origin) -> AbstractContextManager[None]:
    """Calls of the same key that are published inside note that they replace this run."""
    return _inside(_origin, origin)


def origin_here() -> Origin | None:
    """The run that the calling code replaces by a publication or, in eager mode, by an inner run."""
    origin = _origin.get()
    if origin is None:
        return None
    task = get_current_task()
    state = state_of(task.request) if task is not None else None
    # In eager mode the body of a replacement runs in here, and its own calls replace nothing.
    return origin if state is None or state.origin is None else None


def for_a_dead_run(notes: Notes) -> AbstractContextManager[None]:
    """Publish a call of a dead process again under the key of its *notes*: a main process runs no user code."""
    return _inside(_of_a_dead_run, notes.of_the_call())


def options_by_name(
    task_id: Any = None, producer: Any = None, link: Any = None, link_error: Any = None, shadow: Any = None, **rest: Any
) -> dict[str, Any]:
    """Options of `apply_async`, some of which Celery takes by position as well."""
    named = {"task_id": task_id, "producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
    return {**named, **rest}


def _own_run(task: Task, options: Mapping[str, Any]) -> Run | None:
    """The run whose body publishes its next attempt with these options, if one does."""
    if not options.get("retries"):
        return None
    run = run_of(task.request)
    if run is None or run.phase is Phase.ASKING:
        return None
    return run if str(options.get("task_id")) == run.task_id else None


def _known_of(
    task: Task, run: Run | None, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> tuple[Notes, str | None]:
    """The notes that the call has already, and its key; None if a key has to be made of its arguments.

    A call keeps its key: serialising may have changed its arguments, or a deploy may have changed the code of its key.
    """
    if run is not None:
        # A later attempt has the notes of its run, whatever its headers are.
        return run.notes.of_the_call(), run.key if _has_arguments(run, args, kwargs) else None
    headers = options.get("headers")
    task_id = options.get("task_id")
    # Without a task id it is a new call, even if the body that publishes it has handed on its own headers.
    notes = Notes.of(headers if headers and isinstance(headers, Mapping) else None, task_id or "")
    dead = _of_a_dead_run.get()
    if options.get("retries") and not notes.published:
        # Celery forgets the headers if one of them is named `headers`.
        if dead is not None:
            notes = dead
        elif task.request.id == task_id:
            notes = notes_of(task.request).of_the_call()
    if dead is not None:
        return notes, notes.key
    return notes, (notes.key or None) if notes.tries else None


def _has_arguments(run: Run, args: Any, kwargs: Any) -> bool:
    try:
        return list(run.args) == list(args or ()) and dict(run.kwargs) == dict(kwargs or {})
    except Exception:  # noqa: BLE001 (whatever an argument's `__eq__` raises; then make a key)
        return False


def needs_its_key(task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bool:
    """Whether the publisher has to make the key; most calls leave that to the worker."""
    return bool(
        not task._leaves_its_key  # noqa: SLF001 (it is this library's)
        or (options and (options.get("headers") or options.get("retries")))
        or not are_plain(args or ())
        or (kwargs and not are_plain(kwargs.values()))
        or _origin.get()
        or _of_a_dead_run.get()
    )


def publish(task: Task, args: Any, kwargs: Any, options: dict[str, Any], send: Send) -> Any:
    """Publish a call, unless another call with the same key stands for it.

    Returns:
        The result of this call, or of the call that stands for it; a finished result if that cannot be read.

    Raises:
        LockHeld: Another call stands for this one, and `lock_on_conflict` is `raise`.
        StoreError: The store did not answer, and `lock_on_store_error` is `raise`.
        ConfigurationError: The arguments can make no key; or the store refuses us, under any `lock_on_store_error`.
        Exception: Whatever publishing has raised; nothing is queued then.
    """
    # Read the options first: this waits while another thread binds the task, and an unbound task has no request.
    wanted = task.lock_options
    run = _own_run(task, options)
    notes, key = _known_of(task, run, args, kwargs, options)
    problem = None
    try:
        if key is None:
            key = task.lock_key_for(*(args or ()), **(kwargs or {}))
    except (TypeError, ValueError) as error:
        # Celery raises the other errors, now or in the worker: it alone knows of `typing=False` and of models.
        if isinstance(error, ConfigurationError) and not any(map(options.get, _TOLD_BY_A_RESULT)):
            raise
        key = ""
        problem = error
    if run is not None:
        run.note_retry(key)
    if notes.tries or options.get("retries"):
        send = partial(_send_again, task, send)
    task_id = options.get("task_id") or uuid()
    _note_call(task, notes, key, task_id)
    # In the other modes the mark of a retry has ended, because its body has begun.
    is_marked = wanted.mode == "until_executed" if options.get("retries") else wanted.unique_in_queue
    counts_as_queued = bool(key and is_marked)
    # A requeued call was marked, if at all, when it was first published.
    notes.marked = notes.marked if notes.tries else counts_as_queued
    if counts_as_queued and wanted.newest_wins and not (notes.newest or (notes.origin and notes.origin.had_lease)):
        notes.newest = "queued"
    noted = {**options, "task_id": task_id, "headers": with_notes(options.get("headers"), notes)}
    if notes.tries or not counts_as_queued:
        sent = send(**noted)
        if problem and wanted.unique_in_queue:
            text = "no lock key can be made (%s)"
            log.write(logging.WARNING, "lock.unmarked", text, problem, task=task.name, task_id=sent.id)
        return sent
    # A main process makes no label, because that runs user code.
    label = "" if _of_a_dead_run.get() else label_of(task, key, notes.task_id, args or (), kwargs or {})
    # A caller may use an id of its own again; the publication tells the two calls apart.
    has_own_id = bool(options.get("task_id"))
    published = notes.first_published if has_own_id or wanted.newest_wins else 0
    about = {"label": label, "published": published, "queue": _queue_of(task, options)}
    return _ending_its_mark(task, key, _publish_marked(task, key, noted, send, about, has_own_id=has_own_id))


def _queue_of(task: Any, options: Mapping[str, Any]) -> str:
    return queue_by(task, options) if options.keys() & _DESTINATIONS else str(task._usual_queue)  # noqa: SLF001 (ours)


def queue_by(task: Task, options: Mapping[str, Any]) -> str:
    """The queue to which Celery is going to send a call with these options; empty if that is not known.

    A function in `task_routes` is not asked, because it may answer differently when Celery asks it.
    """
    try:
        wanted = {**task._get_exec_options(), **options}  # noqa: SLF001 (Celery merges them so)
        queue = wanted.get("queue")
        if not queue:
            routes = task.app.amqp.router.routes
            is_table = all(isinstance(each, MapRoute) for each in routes)
            if wanted.get("exchange") or wanted.get("routing_key") or not is_table:
                return ""
            found = next(filter(None, (table(task.name) for table in routes)), None)
            queue = found["queue"] if found else task.app.amqp.default_queue
        return str(getattr(queue, "name", queue))
    except Exception:  # noqa: BLE001 (Celery is going to raise it as well)
        return ""


class _WithoutTtl:
    """A producer whose messages no broker drops."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, *args: Any, expiration: Any = None, **options: Any) -> Any:  # noqa: ARG002 (left out)
        return self._producer.publish(*args, **options)


def _send_again(task: Task, send: Send, **options: Any) -> Any:
    """Send a message that a worker has had, without the TTL that Celery makes of `expires` for the broker.

    RabbitMQ drops a message in silence once that TTL is over, so its result would stay RETRY. The header `expires`
    stays, and the next worker ends the call as REVOKED.
    """
    if options.get("expires", task.expires) is None:
        return send(**options)
    with task.app.producer_or_acquire(options.get("producer")) as producer:
        return send(**{**options, "producer": _WithoutTtl(producer)})


def _note_call(task: Task, notes: Notes, key: str, task_id: Any) -> None:
    # The key is that of the arguments that are sent, because a retry may have new arguments.
    notes.task_id = text_of(task_id)
    notes.key = key
    notes.published = notes.published or _now(task, key)
    origin = origin_here()
    if origin is not None and key == origin.key:
        notes.origin = origin


def _now(task: Task, key: str) -> int:
    """The publication of a call, in microseconds: by the store's clock if the newest call wins, else by our own.

    The clocks of two publishers differ by seconds, so by them an older call could win.
    """
    now = None
    # A main process waits for no store.
    if key and task.lock_options.newest_wins and not _of_a_dead_run.get():
        with suppress(SingletonLockError):
            now = store_of(task.app).time(key)
    return now or time.time_ns() // 1000


def _mode_of(options: Mapping[str, Any], *, has_own_id: bool) -> PublishMode:
    """How to mark a call that is sent in any case, because somebody waits for it; empty for every other call."""
    # The body of a chord has the id that it got with its chord.
    is_waited_for = any(map(options.get, _WAITED_FOR)) or (has_own_id and _is_body_of_chord(options["task_id"]))
    if DUE_HEADER in options["headers"] or not is_waited_for:
        return ""
    # A retry is older than whatever is queued by now.
    return "over" if options.get("retries") else "anyway"


def _is_body_of_chord(task_id: Any) -> bool:
    """The call is the body of a chord, published by the last member of the header, or by `celery.chord_unlock`."""
    publisher = get_current_task()
    if publisher is None:
        return False
    of_member: Mapping[str, Any] = (publisher.request.chord or {}).get("options") or {}
    return bool(publisher.name == "celery.chord_unlock" or of_member.get("task_id") == task_id)


def _publish_marked(
    task: Task, key: str, options: dict[str, Any], send: Send, about: Mapping[str, Any], *, has_own_id: bool
) -> AsyncResult:
    """Send the call, or find the call that stands for it; *about* goes into the mark, and not into the message."""
    sent = _mode_of(options, has_own_id=has_own_id)
    mark = partial(_mark, task, key, options, about, sent)
    is_asking = True
    try:
        found = mark()
        if found is not None and not sent and has_ended(task, found):
            unmark(store_of(task.app), key, str(found.task_id), ends_cooldown=False, call_ended=True)
            found = mark()
        is_asking = False
        if found is None or sent:
            return send(**options)
    except BaseException as error:
        # A signal handler may raise at any moment. Errors of the store itself were handled before.
        if not (is_asking and isinstance(error, SingletonLockError)):
            unmark(store_of(task.app), key, text_of(options["task_id"]), may_arrive=is_asking)
        raise
    if has_own_id:
        _revoke_unsent(task, key, options, found)
    # An id that was made here is not reported: the caller has never seen it.
    _report_unpublished(task, key, found, _facts_of(options["task_id"] if has_own_id else "", about["label"]))
    result = task.AsyncResult(found.task_id)
    # Otherwise `get` would wait for ever for a result that is not kept, or that this caller cannot read.
    result.ignored = bool(options.get("ignore_result", task.ignore_result))
    if not result.ignored and (not has_result(task, found) or _is_gone(task, found)):
        _end_as_skipped(task, key, result)
    return result


def _is_gone(task: Task, found: Holder) -> bool:
    """The other call has left only a cool-down, so it has ended; and its result has expired, or was deleted."""
    is_over = task.lock_options.mode == "until_executed" and found.state == "cooldown"
    return is_over and final_result(task, str(found.task_id)) is None


def _revoke_unsent(task: Task, key: str, options: Mapping[str, Any], found: Holder) -> None:
    """Store REVOKED under the id that the caller has chosen, with the call that stands for it."""
    task_id = text_of(options["task_id"])
    is_ignored = options.get("ignore_result") or DUE_HEADER in options["headers"]
    if is_ignored or task_id == found.task_id or why_unreadable(task):
        return
    why = f"lock key={key}: task_id={found.task_id} stands for this call"
    try:
        task.backend.store_result(task_id, CallRevoked(why, key, found.task_id, "unpublished"), states.REVOKED)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises)
        log.write(logging.WARNING, "lock.result_failed", "%s", error, key=key, task_id=task_id)


def _ending_its_mark(task: Task, key: str, result: Any) -> Any:
    """Let `revoke` of the *result* end the mark, so that the next call can be published before a worker hears of it."""
    if not isinstance(result, AsyncResult) or isinstance(result, EagerResult):
        return result
    task_id = result.id

    def revoke(*args: Any, **options: Any) -> None:
        # Use another object of the same id: this function and *result* would keep each other alive.
        task.AsyncResult(task_id).revoke(*args, **options)
        unmark(store_of(task.app), key, text_of(task_id))

    vars(result)["revoke"] = revoke
    return result


def _end_as_skipped(task: Task, key: str, result: AsyncResult) -> None:
    """Let the call end for its caller like a call that is sent and skipped."""
    state = states.SUCCESS
    value = task.lock_options.skip_result
    if not task.lock_options.skips_with_result:
        why = f"lock key={key}: task_id={result.id} stands for this call, and its result cannot be read here"
        state = states.REVOKED
        value = CallRevoked(why, key, result.id, "unpublished")
    result._maybe_set_cache({"task_id": result.id, "status": state, "result": value, "children": []})  # noqa: SLF001


def _mark(task: Task, key: str, options: dict[str, Any], about: Mapping[str, Any], sent: PublishMode) -> Holder | None:
    """Mark the call as queued, or return the call that is in its way."""
    wanted = task.lock_options
    task_id = text_of(options["task_id"])
    store = store_of(task.app)
    limit = wanted.limit if wanted.mode == "until_executed" and not sent else 0
    seconds, due_for, due_in = _times_queued(task, options)
    cooldown = 0.0 if options.get("retries") else wanted.min_hold
    part = store.part_of(key)
    silence = _silence_of(part) if _silences else None
    if silence is not None:
        _allow_unmarked(task, key, task_id, silence, logging.INFO, sent)
        return None
    try:
        about = {**about, "cooldown": cooldown, "due_for": due_for, "sent": sent}
        if wanted.newest_wins:
            about.update(newest=True, due_in=due_in, within=wanted.wait_timeout)
        answer = store.mark_queued(key, task_id, seconds, limit=limit, **about)
        if isinstance(answer, Holder):
            return answer
        if answer.sooner:
            options.update(countdown=max(0.0, due_in - answer.sooner), eta=None)
        return None
    except StoreRefused:
        # The store will refuse the next request as well.
        if sent:
            return None
        raise
    except StoreError as error:
        _silences[part] = clock(), StoreError(*error.args)
        # The request may still arrive, perhaps after the call has ended. Then nothing would remove the mark. A retry
        # keeps the cool-down that its first publishing has begun.
        is_first = not options.get("retries")
        unmark(store, key, task_id, ends_cooldown=is_first, may_arrive=True, in_background=True)
        _allow_unmarked(task, key, task_id, error, logging.WARNING, sent)
        return None


def _silence_of(part: Hashable) -> StoreError | None:
    """The error to report if that part of a store gave no answer a moment ago; else None."""
    at, error = _silences.get(part, (float("-inf"), None))
    if error is None or clock() - at >= _MEMORY:
        return None
    return StoreError(error.store, f"{error.problem} (less than a second ago)")


def _allow_unmarked(task: Task, key: str, task_id: str, error: StoreError, level: int, sent: PublishMode) -> None:
    """Report *error*. With `lock_on_store_error="raise"` also raise it, unless the call is *sent* anyway."""
    is_raised = task.lock_options.on_store_error == "raise" and not sent
    outcome = "raised" if is_raised else "published"
    log.write(level, "lock.unanswered", "%s", error, key=key, task_id=task_id, outcome=outcome)
    count(store_of(task.app), key, "unanswered", task.name, task.lock_options.on_store_error)
    note(store_of(task.app), key, "unanswered", outcome, task.name, _facts_of(task_id))
    if is_raised:
        raise error


def _facts_of(task_id: Any, label: str = "") -> Facts:
    return Facts(text_of(task_id), hostname=socket.gethostname(), pid=os.getpid(), label=label)


def _report_unpublished(task: Task, key: str, found: Holder, call: Facts) -> None:
    log.tell_of_conflict(logging.INFO, key, None, found, "unpublished")
    count(store_of(task.app), key, "conflicts", task.name, "unpublished")
    note(store_of(task.app), key, "conflict", "unpublished", task.name, call, found.task_id)
    signals.lock_conflict.send(sender=task, key=key, holder=found, outcome="unpublished")
    if task.lock_options.on_conflict == "raise" or found.task_id is None:
        raise found.refusal


def _times_queued(task: Task, options: Mapping[str, Any]) -> tuple[float, float, float]:
    """Seconds until the mark ends; from due time to `expires`, or 0 if `lock_queue_ttl` ends it; until due time."""
    due_in = 0.0
    for moment in (options.get("countdown"), options.get("eta")):
        if moment:
            due_in = max(due_in, seconds_until(task, moment))
    longest = due_in + task.lock_options.queue_ttl
    seconds = min(longest, until_expired(task, options.get("expires", task.expires)))
    return seconds, max(0.0, seconds - due_in) if seconds < longest else 0.0, due_in
