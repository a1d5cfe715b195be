"""What becomes of a run that did not get the lock.

It either ends at once with a result that names the holder, or it goes back to
the broker to come again. It owns nothing, so there is nothing for it to release.
"""

import dataclasses
import logging
import random
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from celery import states
from celery.exceptions import Ignore, Retry, TaskRevokedError
from kombu.exceptions import OperationalError

from celery_singleton_lock import signals
from celery_singleton_lock.again import (
    FIRST_DELAY,
    FIRST_HAND_OVER_DELAY,
    delay_for,
    history,
    send_again,
    visibility_timeout,
)
from celery_singleton_lock.errors import LockHeld, StoreError
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.records import Conflict, Holder

if TYPE_CHECKING:
    from celery_singleton_lock.task import SingletonTask

logger = logging.getLogger("celery_singleton_lock")

EVENTS_HEADER = "lock_events"
"""Where the main process of a worker tells a pool child that somebody listens for events."""

_LONGEST_JOIN_DELAY = 1.0


def settle(task: "SingletonTask", conflict: Conflict) -> Any:
    """End a run whose key is held, the way the task's `lock_on_conflict` says.

    Returns:
        What the run returns in place of its body's result.

    Raises:
        LockHeld, Ignore, Retry: The other ways to end.
    """
    for holder in conflict.holders:
        if holder.task_id is not None and holder.task_id == task.request.id and holder.fence:
            park(task, holder)
    holder, policy = conflict.first, task.lock_options.on_conflict
    if policy == "skip":
        tell(task, holder, "skipped")
        return skip(task, f"lock key={holder.key} is held by task_id={holder.task_id}")
    if task.request.is_eager or policy in ("raise", "wait"):
        tell(task, holder, "raised")
        raise LockHeld(holder.key, holder.task_id, holder.expires_in)
    if policy == "join":
        join(task, holder, free_since=None)
    if policy in ("rerun", "replace"):
        return _succeed(task, conflict)
    return _come_again(task, holder)


def unanswered(task: "SingletonTask", key: str, error: StoreError) -> Any:
    """End a run whose acquire got no answer, the way `lock_on_store_error` says.

    Returns:
        What the run returns in place of its body's result.

    Raises:
        StoreError, Ignore, Retry: The other ways to end.
    """
    policy = task.lock_options.on_store_error
    logger.warning("lock.unanswered key=%s task_id=%s policy=%s: %s", key, task.request.id, policy, error)
    if policy == "skip":
        return skip(task, str(error))
    if policy == "reschedule" and not task.request.is_eager:
        delay = delay_for(task, task.lock_options.ttl)
        raise Retry(str(error), exc=error, when=delay, sig=send_again(task, delay))
    raise error


def skip(task: "SingletonTask", reason: str) -> Any:
    """End without a run, as a skipped one does.

    Returns:
        The result, where it has one; otherwise the run ends as REVOKED.
    """
    return task.lock_skip_result if task.skips_with_result else revoke(task, reason)


def revoke(task: "SingletonTask", reason: str) -> None:
    """End as REVOKED, or without a result in the header of a chord, whose body waits for every member.

    Raises:
        Ignore: So that Celery stores nothing else.
        TaskRevokedError: In eager mode, where nothing is stored.
    """
    request = task.request
    if request.chord:
        return
    revoked = TaskRevokedError(reason)
    if request.is_eager:
        raise revoked
    # As a failure, because that also ends the chain (and a chord the chain is
    # in), which mark_as_revoked leaves waiting for ever.
    task.backend.mark_as_failure(
        request.id,
        revoked,
        request=request,
        store_result=not (task.ignore_result or request.ignore_result),
        call_errbacks=False,
        state=states.REVOKED,
    )
    raise Ignore(reason)


def park(task: "SingletonTask", holder: Holder, **notes: Any) -> NoReturn:
    """Send a copy of a live run, or its own retry, back without a trace in its result."""
    request = task.request
    # retry() and replace() publish before their body has ended, usually by milliseconds.
    hands_over = request.retries > holder.attempt or bool(request.replaced_task_nesting)
    first = FIRST_HAND_OVER_DELAY if hands_over else FIRST_DELAY
    send_again(task, delay_for(task, holder.expires_in, first), parked=not hands_over, **notes)
    tell(task, holder, "parked")
    # Not Retry: that would store a state over the one of the run that goes on.
    raise Ignore("another run of this very task holds the lock")


def join(task: "SingletonTask", holder: Holder, **notes: Any) -> NoReturn:
    """Come again to see whether the holder has ended; its result is the run's as well."""
    longest = min(_LONGEST_JOIN_DELAY, visibility_timeout(task) / 4)
    delay = random.uniform(longest / 2, longest)
    again = send_again(task, delay, joins=holder.task_id, **notes)
    tell(task, holder, "joined")
    held = LockHeld(holder.key, holder.task_id, holder.expires_in)
    raise Retry(str(held), exc=held, when=delay, sig=again)


def former_holder(key: str, task_id: str, attempt: int = 0) -> Holder:
    """Somebody who had the lock, described as far as a task id tells."""
    return Holder(key, "", 0, datetime.now(UTC), 0.0, task_id, attempt=attempt)


def _succeed(task: "SingletonTask", conflict: Conflict) -> Any:
    """Come again to run next, or make way for whoever does."""
    holder, request = conflict.first, task.request
    if conflict.successor == request.id:
        _come_again(task, holder, asked_at=history(request).get("asked_at", conflict.at))
    if task.lock_options.on_conflict == "rerun" and request.retries:
        _come_again(task, holder)
    newer = dataclasses.replace(holder, task_id=conflict.successor or holder.task_id)
    tell(task, newer, "collapsed")
    return skip(task, f"lock key={holder.key}: task_id={newer.task_id} runs in place of this one")


def _come_again(task: "SingletonTask", holder: Holder, **notes: Any) -> NoReturn:
    delay = delay_for(task, holder.expires_in)
    held = LockHeld(holder.key, holder.task_id, holder.expires_in)
    timeout = task.lock_options.wait_timeout
    if timeout is not None and time.time() - history(task.request)["since"] + delay > timeout:
        if "asked_at" in notes:
            with suppress(StoreError):
                # If this fails, it is given up for not coming again.
                store_of(task.app).withdraw(holder.key, task.request.id)
        tell(task, holder, "raised")
        raise held
    again = send_again(task, delay, **notes)
    tell(task, holder, "rescheduled")
    raise Retry(str(held), exc=held, when=delay, sig=again)


def tell(task: "SingletonTask", holder: Holder, outcome: str) -> None:
    """Say what has become of a run that was not done: in the log, by the signal, and by an event."""
    request = task.request
    logger.info(
        "lock.conflict key=%s task_id=%s holder=%s age=%.1f remaining=%.1f outcome=%s",
        holder.key,
        request.id,
        holder.task_id,
        holder.age,
        holder.expires_in,
        outcome,
    )
    signals.lock_conflict.send(sender=task, key=holder.key, holder=holder, outcome=outcome)
    if request.get(EVENTS_HEADER):
        try:
            task.send_event("task-lock-conflict", key=holder.key, holder=holder.task_id, outcome=outcome)
        except OperationalError as error:
            logger.warning("lock.unpublished task_id=%s: no event: %s", request.id, error)
