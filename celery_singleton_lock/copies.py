"""Messages that are delivered twice: the copy of a run that has ended is dropped.

A broker delivers a message again that was not acknowledged in time: one with
late acks, or one that waits for its ETA in a worker. So the run of such a message
leaves a note when it ends, and whatever may be a copy looks for it first.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock.again import history, visibility_timeout
from celery_singleton_lock.conflict import former_holder, park, tell
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.settings import store_of

if TYPE_CHECKING:
    from celery_singleton_lock.task import SingletonTask

logger = logging.getLogger("celery_singleton_lock")

# A result is stored right after the note. Where it is still missing so much later, the process died in between.
_RESULT_GRACE = 5.0
# By default kombu looks every hundred seconds for messages whose timeout has passed.
_SWEEP = 120.0


def drop_copy(task: "SingletonTask", key: str) -> None:
    """Return if this message has to run as far as its earlier deliveries are concerned.

    Raises:
        Ignore: A run of it has ended, or is about to have ended and it comes again.
        StoreError: The store did not answer.
    """
    request = task.request
    notes = history(request)
    if request.is_eager or not (_is_redelivered(request) or notes.get("parked") or notes.get("eta")):
        return
    noted = store_of(task.app).noted(_note_key(task))
    if noted is None:
        return
    attempt, outcome = noted.split(" ")
    if request.retries > int(attempt):
        return
    itself = former_holder(key, request.id, int(attempt))
    if outcome == "ended" and not _has_result(task):
        since = notes.get("ended_since", time.time())
        if time.time() - since > _RESULT_GRACE:
            return
        park(task, itself, ended_since=since)
    tell(task, itself, "dropped")
    raise Ignore("a run of this message has ended already")


@contextmanager
def noting_the_end(task: "SingletonTask") -> Iterator[None]:
    """Leave word that the run of this message has ended, where it may be delivered again."""
    request = task.request
    if request.is_eager or not (task.acks_late or history(request).get("eta")):
        yield
        return
    try:
        yield
    except (Ignore, Reject):
        # What they are meant for may be just that the message comes again.
        raise
    except Retry:
        _note(task, "retried")
        raise
    except Exception:
        # Celery 5.7 has an option for failures alone, which follows the older one where it is not set.
        if getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout):
            _note(task, "ended")
        raise
    _note(task, "ended")


def _note(task: "SingletonTask", outcome: str) -> None:
    request = task.request
    try:
        kept = visibility_timeout(task) + _SWEEP
        store_of(task.app).note(_note_key(task), f"{request.retries or 0} {outcome}", kept)
    except StoreError as error:
        logger.warning("lock.unnoted task_id=%s: a copy of it may run: %s", request.id, error)


def _is_redelivered(request: Context) -> bool:
    return bool((request.delivery_info or {}).get("redelivered"))


def _has_result(task: "SingletonTask") -> bool:
    request = task.request
    if task.ignore_result or request.ignore_result:
        return True
    try:
        return bool(task.AsyncResult(request.id).ready())
    except (AttributeError, NotImplementedError):
        # The app has no result backend.
        return True


def _note_key(task: "SingletonTask") -> str:
    return f"{task.lock_options.prefix}:v1:done:{task.request.id}"
