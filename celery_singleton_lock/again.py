"""Sending a message back to the broker, to come again."""

import logging
import random
import time
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.exceptions import Reject
from kombu.exceptions import OperationalError

if TYPE_CHECKING:
    from celery_singleton_lock.task import SingletonTask

logger = logging.getLogger("celery_singleton_lock")

HEADER = "singleton_lock"

FIRST_DELAY = 0.25
FIRST_HAND_OVER_DELAY = 0.05
_LONGEST_DELAY = 2.0
_DEFAULT_VISIBILITY_TIMEOUT = 3600.0
# About a minute. By then a broker that restarts is back; a job is worth the wait.
_PATIENT_PUBLISH = {"max_retries": 30, "interval_start": 0.2, "interval_step": 0.2, "interval_max": 2.0}


def history(request: Context) -> dict[str, Any]:
    """What we have noted on this message: how often it has come, since when it waits, what for."""
    known = (request.headers or {}).get(HEADER)
    return dict(known) if known else {"tries": 0, "since": time.time(), "eta": bool(request.eta)}


def forget_history(request: Context) -> None:
    """It has stopped waiting; a retry of the body starts a new wait."""
    if request.headers:
        request.headers.pop(HEADER, None)


def visibility_timeout(task: "SingletonTask") -> float:
    """Seconds after which the broker may deliver a message again that was not acknowledged."""
    options = task.app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", _DEFAULT_VISIBILITY_TIMEOUT))


def delay_for(task: "SingletonTask", expires_in: float, first: float = FIRST_DELAY) -> float:
    """Seconds until this message should come again: jittered, and longer each time."""
    # A message with a countdown stays unacknowledged until it is due, so a delay
    # near the visibility timeout would have it delivered a second time.
    longest = min(_LONGEST_DELAY, task.lock_options.ttl / 3, visibility_timeout(task) / 4)
    delay = min(longest, first * 2 ** min(history(task.request)["tries"], 10))
    return float(min(random.uniform(delay / 2, delay), max(FIRST_HAND_OVER_DELAY, expires_in)))


def send_again(task: "SingletonTask", delay: float, **notes: Any) -> Any:
    """Publish the same message; `retries`, chord, chain, links and expiry stay.

    Arguments:
        task: The one whose request is to come again.
        delay: Seconds until then.
        notes: What to remember on the message; the rest of its history stays.

    Raises:
        Reject: The broker cannot be reached, and will deliver the message again by itself.
        OperationalError: It cannot be reached, and the message was acknowledged already.
    """
    request = task.request
    known = history(request)
    again = task.signature_from_request(
        request,
        retries=request.retries,
        countdown=delay,
        headers={**(request.headers or {}), HEADER: {**known, **notes, "tries": known["tries"] + 1}},
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
