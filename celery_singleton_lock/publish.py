"""Unique in the queue: a call that is queued or runs already is not published again."""

import logging
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock import signals
from celery_singleton_lock.errors import LockHeld, StoreError
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Holder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery_singleton_lock.task import SingletonTask

logger = logging.getLogger("celery_singleton_lock")

ENTRY_HEADER = "beat_entry"
DUE_HEADER = "beat_due"
"""Where a beat tells which entry it has sent, and when it was due."""

KEY_HEADER = "lock_key"
"""Where a publisher tells the worker the key under which the call is queued."""

WHILE_EXECUTING = "while_executing"
UNTIL_EXECUTING = "until_executing"
UNTIL_EXECUTED = "until_executed"


def is_unique_in_the_queue(task: "SingletonTask") -> bool:
    """Calls of the task are told apart when they are published."""
    return task.lock_options.mode != WHILE_EXECUTING


def is_awaited(options: "Mapping[str, Any]") -> bool:
    """Somebody waits for just this call: a canvas, or the run of which it is a retry. A beat does not."""
    return bool(options.get("task_id")) and DUE_HEADER not in (options.get("headers") or {})


def publish_once(task: "SingletonTask", key: str, options: dict[str, Any], send: "Callable[..., Any]") -> Any:
    """Publish a call, unless one with the same key is queued, or runs where the mode counts that.

    Returns:
        The result of this call, or of the one that was found.

    Raises:
        LockHeld: One was found, and `lock_on_conflict` is `raise`.
        StoreError: The store did not answer, and `lock_on_store_error` is `raise`.
        Exception: Whatever publishing has raised; nothing is queued then.
    """
    task_id = options["task_id"] = options.get("task_id") or uuid()
    options["headers"] = {**(options.get("headers") or {}), KEY_HEADER: key}
    try:
        found = _mark(task, key, task_id, options)
        if found is None:
            return send(**options)
    except BaseException:
        with suppress(StoreError):
            # If this fails as well, the mark ends by itself.
            store_of(task.app).withdraw(key, task_id, afresh=True)
        raise
    return _refuse(task, key, found)


def _mark(task: "SingletonTask", key: str, task_id: str, options: dict[str, Any]) -> Holder | None:
    """Mark the call as queued, or find the one that is in its way."""
    wanted = task.lock_options
    try:
        return store_of(task.app).publish(
            key,
            task_id,
            wanted.queue_ttl + _lead(task, options),
            counts_running=wanted.mode == UNTIL_EXECUTED,
            quiet=wanted.min_hold,
        )
    except StoreError as error:
        logger.warning("lock.unanswered key=%s task_id=%s policy=%s: %s", key, task_id, wanted.on_store_error, error)
        if wanted.on_store_error == "raise":
            raise
        # It is settled when it runs, so a message too many is better than one too few.
        return None


class Withdrawal:
    """A call that is revoked, expired or thrown away, and so is queued no longer; done by `leftovers`."""

    def __init__(self, store: Store, key: str, task_id: str, ttl: float) -> None:
        self.key = key
        self.ttl = ttl
        self._store = store
        self._task_id = task_id

    def release_again(self) -> bool:
        """Try; True once answered."""
        try:
            self._store.withdraw(self.key, self._task_id)
        except StoreError:
            return False
        return True


def _refuse(task: "SingletonTask", key: str, found: Holder) -> Any:
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
    return task.AsyncResult(found.task_id)


def _lead(task: "SingletonTask", options: dict[str, Any]) -> float:
    """Seconds from now until the message may be taken at the earliest, or is thrown away."""
    moments = [options.get("countdown"), options.get("eta"), options.get("expires", task.expires)]
    return max([0.0, *[_seconds_until(task, moment) for moment in moments if moment]])


def _seconds_until(task: "SingletonTask", moment: Any) -> float:
    if isinstance(moment, int | float):
        return float(moment)
    until: timedelta = maybe_make_aware(maybe_iso8601(moment), task.app.timezone) - datetime.now(UTC)
    return until.total_seconds()
