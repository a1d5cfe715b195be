"""What happens to a call before its message leaves: it gets its notes, and may turn out to be queued already."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Task, states, uuid
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock import signals
from celery_singleton_lock.errors import ConfigurationError, LockHeld, StoreError
from celery_singleton_lock.runs.message import DUE_HEADER, Notes, with_notes
from celery_singleton_lock.runs.results import has_result
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Holder

logger = logging.getLogger("celery_singleton_lock")

UNTIL_EXECUTED = "until_executed"

Send = Callable[..., Any]

_for_a_dead_run: ContextVar[bool] = ContextVar("for_a_dead_run", default=False)


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


def key_to_keep(headers: Mapping[str, Any] | None) -> str | None:
    """The key that is written on a message, if this process must not make one."""
    return Notes.of(headers).key if _for_a_dead_run.get() else None


def publish(task: Task, key: str, options: Mapping[str, Any], send: Send) -> Any:
    """Publish a call, unless another one with the same key stands for it.

    Returns:
        The result of this call, or of the one that was found; if that cannot be read, one that has ended.

    Raises:
        LockHeld: One was found, and `lock_on_conflict` is `raise`.
        StoreError: The store did not answer, and `lock_on_store_error` is `raise`.
        ConfigurationError: The store refuses us, whatever that is.
        Exception: Whatever publishing has raised; nothing is queued then.
    """
    headers = options.get("headers")
    known = Notes.of(headers)
    # The key of the arguments it is sent with: a retry may have new ones.
    published = known.published or time.time_ns() // 1000
    notes = replace(known, key=key, published=published, died=_for_a_dead_run.get())
    noted = {**options, "headers": with_notes(headers, notes)}
    if not task.lock_options.unique_in_queue or notes.tries:
        return send(**noted)
    if options.get("retries") and key and task.lock_options.mode == UNTIL_EXECUTED:
        return _publish_retry(task, key, noted, send)
    # A call that has an id already, as a member of a canvas, is always sent,
    # because somebody waits for it; it is settled when it runs.
    if options.get("task_id") and DUE_HEADER not in (headers or {}):
        return send(**noted)
    return _publish_once(task, key, noted, send)


def _publish_once(task: Task, key: str, options: dict[str, Any], send: Send) -> Any:
    options["task_id"] = options.get("task_id") or uuid()
    counts_running = task.lock_options.mode == UNTIL_EXECUTED
    found = _mark(task, key, options, limit=task.lock_options.limit if counts_running else 0)
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
        state, value = states.REVOKED, TaskRevokedError(why)
    result._maybe_set_cache({"task_id": result.id, "status": state, "result": value, "children": []})  # noqa: SLF001


def _publish_retry(task: Task, key: str, options: dict[str, Any], send: Send) -> Any:
    """Always, but until the retry runs its call counts as queued, unless another one does."""
    with suppress(StoreError):
        _mark(task, key, options, limit=0)
    return _send(task, key, options, send)


def _send(task: Task, key: str, options: dict[str, Any], send: Send) -> Any:
    try:
        return send(**options)
    except BaseException:
        with suppress(StoreError):
            # If this fails as well, the mark ends by itself.
            store_of(task.app).unmark(key, options["task_id"])
        raise


def _mark(task: Task, key: str, options: dict[str, Any], limit: int) -> Holder | None:
    """Mark the call as queued, or find the one that is in its way."""
    wanted, task_id = task.lock_options, options["task_id"]
    seconds = wanted.queue_ttl + _lead(task, options)
    quiet = 0.0 if options.get("retries") else wanted.min_hold
    try:
        return store_of(task.app).mark_queued(key, task_id, seconds, limit=limit, quiet=quiet)
    except ConfigurationError:
        # It refuses us, and will the next time.
        raise
    except StoreError as error:
        is_raised = wanted.on_store_error == "raise"
        outcome = "raised" if is_raised else "published"
        logger.warning("lock.unanswered key=%s task_id=%s outcome=%s: %s", key, task_id, outcome, error)
        if is_raised:
            with suppress(StoreError):
                # It may have been marked all the same.
                store_of(task.app).unmark(key, task_id)
            raise
        # It is settled when it runs, so a message too many is better than one too few.
        return None


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
