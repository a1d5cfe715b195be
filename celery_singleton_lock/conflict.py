"""What becomes of a run that did not get the lock.

It either ends at once with a result that names the holder, or it goes back to
the broker to come again. It owns nothing, so there is nothing for it to release.
"""

import logging
import random
import time
from typing import TYPE_CHECKING, Any, NoReturn

from celery import states
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from kombu.exceptions import OperationalError

from celery_singleton_lock import signals
from celery_singleton_lock.backends.base import Conflict, Holder
from celery_singleton_lock.errors import BackendError, LockHeld

if TYPE_CHECKING:
    from celery_singleton_lock.task import SingletonTask

logger = logging.getLogger("celery_singleton_lock")

HEADER = "singleton_lock"

_FIRST_DELAY = 0.25
_LONGEST_DELAY = 2.0
_FIRST_HAND_OVER_DELAY = 0.05
_DEFAULT_VISIBILITY_TIMEOUT = 3600
# About a minute. By then a broker that restarts is back; a job is worth the wait.
_PATIENT_PUBLISH = {"max_retries": 30, "interval_start": 0.2, "interval_step": 0.2, "interval_max": 2.0}


def settle(task: "SingletonTask", conflict: Conflict) -> Any:
    """End a run whose key is held, the way the task's `lock_on_conflict` says.

    Returns:
        What the run returns in place of its body's result.

    Raises:
        LockHeld, Ignore, Retry: The other ways to end.
    """
    request = task.request
    for holder in conflict.holders:
        if holder.task_id is not None and holder.task_id == request.id:
            _park(task, holder)
    holder = conflict.first
    policy = task.lock_options.on_conflict
    if policy == "reschedule" and not request.is_eager:
        _reschedule(task, holder)
    if policy == "skip":
        _tell(task, holder, "skipped")
        return _skip(task, f"lock key={holder.key} is held by task_id={holder.task_id}")
    _tell(task, holder, "raised")
    raise LockHeld(holder.key, holder.task_id, holder.expires_in)


def unanswered(task: "SingletonTask", key: str, error: BackendError) -> Any:
    """End a run whose acquire got no answer, the way `lock_on_backend_error` says.

    Returns:
        What the run returns in place of its body's result.

    Raises:
        BackendError, Ignore, Retry: The other ways to end.
    """
    policy = task.lock_options.on_backend_error
    logger.warning("lock.unanswered key=%s task_id=%s policy=%s: %s", key, task.request.id, policy, error)
    if policy == "skip":
        return _skip(task, str(error))
    if policy == "reschedule" and not task.request.is_eager:
        delay = _delay(task, task.lock_options.ttl)
        raise Retry(str(error), exc=error, when=delay, sig=_requeue(task, delay))
    raise error


def _skip(task: "SingletonTask", reason: str) -> Any:
    request = task.request
    if task.skips_with_result:
        return task.lock_skip_result
    if request.chord:
        # The body of a chord waits for every member of its header.
        return None
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


def _reschedule(task: "SingletonTask", holder: Holder) -> NoReturn:
    delay = _delay(task, holder.expires_in)
    held = LockHeld(holder.key, holder.task_id, holder.expires_in)
    timeout = task.lock_options.wait_timeout
    if timeout is not None and time.time() - _history(task.request)["since"] + delay > timeout:
        _tell(task, holder, "raised")
        raise held
    again = _requeue(task, delay)
    _tell(task, holder, "rescheduled")
    raise Retry(str(held), exc=held, when=delay, sig=again)


def _park(task: "SingletonTask", holder: Holder) -> NoReturn:
    """Send a copy of a live run, or its own retry, back without a trace in its result."""
    request = task.request
    # retry() publishes before its body has ended, usually by milliseconds.
    hands_over = request.retries > holder.attempt
    first = _FIRST_HAND_OVER_DELAY if hands_over else _FIRST_DELAY
    _requeue(task, _delay(task, holder.expires_in, first))
    _tell(task, holder, "parked")
    # Not Retry: that would store a state over the one of the run that goes on.
    raise Ignore("another run of this very task holds the lock")


def _delay(task: "SingletonTask", expires_in: float, first: float = _FIRST_DELAY) -> float:
    options = task.app.conf.broker_transport_options or {}
    visibility_timeout = options.get("visibility_timeout", _DEFAULT_VISIBILITY_TIMEOUT)
    # A message with a countdown stays unacknowledged until it is due, so a delay
    # near the visibility timeout would have it delivered a second time.
    longest = min(_LONGEST_DELAY, task.lock_options.ttl / 3, visibility_timeout / 4)
    delay = min(longest, first * 2 ** min(_history(task.request)["tries"], 10))
    return float(min(random.uniform(delay / 2, delay), max(_FIRST_HAND_OVER_DELAY, expires_in)))


def _requeue(task: "SingletonTask", delay: float) -> Any:
    """Publish the same message again; `retries`, chord, chain, links and expiry stay."""
    request = task.request
    history = _history(request)
    history["tries"] += 1
    again = task.signature_from_request(
        request,
        retries=request.retries,
        countdown=delay,
        headers={**(request.headers or {}), HEADER: history},
        retry=True,
        retry_policy=_PATIENT_PUBLISH,
    )
    try:
        again.apply_async()
    except OperationalError as error:
        logger.error("lock.unpublished task_id=%s: %s", request.id, error)
        if task.acks_late:
            raise Reject(error, requeue=True) from error
        raise
    return again


def _history(request: Context) -> dict[str, Any]:
    """How often this message has come and since when it has been waiting."""
    known = (request.headers or {}).get(HEADER) or {}
    return {"tries": known.get("tries", 0), "since": known.get("since", time.time())}


def _tell(task: "SingletonTask", holder: Holder, outcome: str) -> None:
    logger.info(
        "lock.conflict key=%s task_id=%s holder=%s age=%.1f remaining=%.1f outcome=%s",
        holder.key,
        task.request.id,
        holder.task_id,
        holder.age,
        holder.expires_in,
        outcome,
    )
    signals.lock_conflict.send(sender=task, key=holder.key, holder=holder, outcome=outcome)
