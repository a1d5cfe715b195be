"""What happens to a call before its message leaves: it gets its notes, and may turn out to be queued already."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any
from weakref import WeakKeyDictionary

from celery import Task, states, uuid
from celery.app.task import Context
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock import signals
from celery_singleton_lock.errors import ConfigurationError, LockHeld, StoreError
from celery_singleton_lock.label import label_of
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.runs.marks import unmark_later
from celery_singleton_lock.runs.message import DUE_HEADER, Notes, with_notes
from celery_singleton_lock.runs.results import has_result
from celery_singleton_lock.runs.revoked import CallRevoked
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.start import check_publisher
from celery_singleton_lock.stores.base import Store, clock
from celery_singleton_lock.stores.records import Holder

logger = logging.getLogger("celery_singleton_lock")

UNTIL_EXECUTED = "until_executed"

Send = Callable[..., Any]

# A page that sends ten calls waits once for a store that is away.
_MEMORY = 1.0
_silences: WeakKeyDictionary[Store, tuple[float, StoreError]] = WeakKeyDictionary()

# Most calls are published without headers, so nothing is made to look into them.
_NO_NOTES = Notes()

_for_a_dead_run: ContextVar[bool] = ContextVar("for_a_dead_run", default=False)
_continued: ContextVar[tuple[str, int] | None] = ContextVar("continued", default=None)


@contextmanager
def continuing(key: str, fence: int) -> Iterator[None]:
    """Publish what replaces the run with this fence: a call of its key is no new one, and waits for the run's end."""
    token = _continued.set((key, fence))
    try:
        yield
    finally:
        _continued.reset(token)


def continues(lease: Lease) -> bool:
    """The run of this lease is being replaced by what the calling code runs."""
    return _continued.get() == (lease.key, lease.fence)


@contextmanager
def for_a_dead_run() -> Iterator[None]:
    """Publish calls of dead processes again under the key that is written on them.

    A main process runs no user code to make one.
    """
    token = _for_a_dead_run.set(True)
    try:
        yield
    finally:
        _for_a_dead_run.reset(token)


def next_attempt_of(request: Context, options: Mapping[str, Any]) -> Run | None:
    """The run whose body publishes its next attempt with these options."""
    run: Run | None = request.get("lock_run")
    is_its = run is not None and run.has_begun and options.get("task_id") == run.task_id and options.get("retries")
    return run if is_its else None


def key_to_keep(run: Run | None, args: Any, kwargs: Any, options: Mapping[str, Any]) -> str | None:
    """The key that a call has already; None if one is to be made of its arguments.

    They have been serialised since its publisher made it, and the code that makes keys may be another by now.

    Arguments:
        run: Whose next attempt it is.
        args: Of the call.
        kwargs: Of the call.
        options: What it is published with.
    """
    headers = options.get("headers")
    # Without a task id it is a new call, whosever headers it was handed.
    notes = Notes.of(headers, options.get("task_id") or "") if headers else _NO_NOTES
    if _for_a_dead_run.get():
        return notes.key
    if notes.tries:
        return notes.key or None
    return run.key if run is not None and _has_arguments(run, args, kwargs) else None


def _has_arguments(run: Run, args: Any, kwargs: Any) -> bool:
    try:
        return list(run.args) == list(args or ()) and dict(run.kwargs) == dict(kwargs or {})
    except Exception:  # noqa: BLE001 (an argument's own; then a key is made of them)
        return False


def publish(
    task: Task, key: str, options: Mapping[str, Any], send: Send, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """Publish a call, unless another one with the same key stands for it; *args* and *kwargs* are those of the call.

    Returns:
        The result of this call, or of the one that was found; if that cannot be read, one that has ended.

    Raises:
        LockHeld: One was found, and `lock_on_conflict` is `raise`.
        StoreError: The store did not answer, and `lock_on_store_error` is `raise`.
        ConfigurationError: The store refuses us, whatever that is.
        Exception: Whatever publishing has raised; nothing is queued then.
    """
    check_publisher(task)
    headers, task_id = options.get("headers"), options.get("task_id") or uuid()
    notes = Notes.of(headers, task_id)
    # The key of the arguments it is sent with: a retry may have new ones.
    notes.task_id, notes.key, notes.died = task_id, key, _for_a_dead_run.get()
    notes.published = notes.published or time.time_ns() // 1000
    continued_key, fence = _continued.get() or ("", 0)
    if key == continued_key:
        notes.continues = fence
    noted = {**options, "task_id": task_id, "headers": with_notes(headers, notes)}
    if not task.lock_options.unique_in_queue or notes.tries:
        return send(**noted)
    # A main process makes none, because that runs user code.
    label = "" if notes.died else label_of(task, key, task_id, args, kwargs or {})
    if options.get("retries") and key and task.lock_options.mode == UNTIL_EXECUTED:
        return _publish_retry(task, key, noted, send, label)
    # A call that has an id already, as a member of a canvas, is always sent,
    # because somebody waits for it; it is settled when it runs.
    if options.get("task_id") and DUE_HEADER not in (headers or {}):
        return send(**noted)
    return _publish_once(task, key, noted, send, label)


def _publish_once(task: Task, key: str, options: dict[str, Any], send: Send, label: str) -> Any:
    counts_running = task.lock_options.mode == UNTIL_EXECUTED
    found = _mark(task, key, options, label, limit=task.lock_options.limit if counts_running else 0)
    if found is None:
        return _send(task, key, options, send)
    _refuse(task, key, found)
    result = task.AsyncResult(found.task_id)
    # In either case `get` would wait for ever for what is not kept, or not for this caller.
    result.ignored = bool(options.get("ignore_result", task.ignore_result))
    if not (result.ignored or has_result(task, found)):
        _end_as_skipped(task, key, result)
    return result


def _end_as_skipped(task: Task, key: str, result: AsyncResult) -> None:
    """Let it end for its caller as a call does that is sent and skipped."""
    state, value = states.SUCCESS, task.lock_options.skip_result
    if not task.lock_options.skips_with_result:
        why = f"lock key={key}: task_id={result.id} stands for this call, and its result cannot be read here"
        state, value = states.REVOKED, CallRevoked(why, key, result.id, "unpublished")
    result._maybe_set_cache({"task_id": result.id, "status": state, "result": value, "children": []})  # noqa: SLF001


def _publish_retry(task: Task, key: str, options: dict[str, Any], send: Send, label: str) -> Any:
    """Always, but until the retry runs its call counts as queued, unless another one does."""
    with suppress(StoreError):
        _mark(task, key, options, label, limit=0)
    return _send(task, key, options, send)


def _send(task: Task, key: str, options: dict[str, Any], send: Send) -> Any:
    try:
        return send(**options)
    except BaseException:
        with suppress(StoreError):
            # If this fails as well, the mark ends by itself.
            store_of(task.app).unmark(key, options["task_id"])
        raise


def _mark(task: Task, key: str, options: dict[str, Any], label: str, limit: int) -> Holder | None:
    """Mark the call as queued, or find the one that is in its way."""
    wanted, task_id, store = task.lock_options, options["task_id"], store_of(task.app)
    seconds = wanted.queue_ttl + _lead(task, options)
    quiet = 0.0 if options.get("retries") else wanted.min_hold
    silence = _silence_of(store)
    if silence is not None:
        _allow_unmarked(task, key, task_id, silence, logging.INFO)
        return None
    try:
        found = store.mark_queued(key, task_id, seconds, limit=limit, quiet=quiet, label=label)
    except ConfigurationError:
        # It refuses us, and will the next time.
        raise
    except StoreError as error:
        _silences[store] = clock(), StoreError(*error.args)
        if wanted.on_store_error == "raise":
            # It may have been marked all the same.
            unmark_later(store, key, task_id)
        _allow_unmarked(task, key, task_id, error, logging.WARNING)
        return None
    _silences.pop(store, None)
    return found


def _silence_of(store: Store) -> StoreError | None:
    """What is to be told of a store that gave no answer a moment ago."""
    at, error = _silences.get(store, (float("-inf"), None))
    if error is None or clock() - at >= _MEMORY:
        return None
    return StoreError(error.store, f"{error.problem} (less than a second ago)")


def _allow_unmarked(task: Task, key: str, task_id: str, error: StoreError, level: int) -> None:
    """Return if the call may be sent all the same: it is settled when it runs.

    Raises:
        StoreError: `lock_on_store_error` is `raise`; with anything else, better a message too many than one too few.
    """
    is_raised = task.lock_options.on_store_error == "raise"
    outcome = "raised" if is_raised else "published"
    logger.log(level, "lock.unanswered key=%s task_id=%s outcome=%s: %s", key, task_id, outcome, error)
    if is_raised:
        raise error


def _refuse(task: Task, key: str, found: Holder) -> None:
    logger.info(
        "lock.conflict key=%s task_id=None holder=%s age=%.1f remaining=%.1f outcome=unpublished",
        key,
        found.task_id,
        found.age,
        found.expires_in,
    )
    signals.lock_conflict.send(sender=task, key=key, holder=found, outcome="unpublished")
    if task.lock_options.on_conflict == "raise" or found.task_id is None:
        raise LockHeld(key, found.task_id, found.expires_in)


def _lead(task: Task, options: Mapping[str, Any]) -> float:
    """Seconds from now until the message may be taken at the earliest, or is thrown away."""
    moments = [options.get("countdown"), options.get("eta"), options.get("expires", task.expires)]
    return max([0.0, *[_seconds_until(task, moment) for moment in moments if moment]])


def _seconds_until(task: Task, moment: Any) -> float:
    if isinstance(moment, int | float):
        return float(moment)
    until: timedelta = maybe_make_aware(maybe_iso8601(moment), task.app.timezone) - datetime.now(UTC)
    return until.total_seconds()
