"""Ending with the result of somebody else's run."""

import time
from typing import TYPE_CHECKING, Any

from billiard.exceptions import WorkerLostError
from celery import states
from celery.backends.base import DisabledBackend

from celery_singleton_lock.again import history
from celery_singleton_lock.conflict import former_holder, join, revoke
from celery_singleton_lock.settings import store_of

if TYPE_CHECKING:
    from celery_singleton_lock.task import SingletonTask

# A lease is released before the result is stored. Where it is still missing so
# much later, there will be none: the holder has died, or keeps no results.
_RESULT_GRACE = 1.5


class NotJoined:
    """The run has to ask for the lock itself."""


def joined_result(task: "SingletonTask", key: str) -> Any:
    """The result of the run that this one has joined, if that has ended.

    Returns:
        Its result, or `NotJoined`.

    Raises:
        Exception: The one with which it failed.
        Ignore: It was revoked, and so is this run.
        Retry: It goes on, and this run comes again.
        StoreError: The store did not answer.
    """
    notes = history(task.request)
    joins = notes.get("joins")
    if joins is None or isinstance(task.backend, DisabledBackend):
        return NotJoined
    result = task.AsyncResult(joins)
    state = result.state
    if state == states.SUCCESS:
        return result.result
    if state == states.REVOKED:
        return revoke(task, f"lock key={key}: task_id={joins}, which this run had joined, was revoked")
    if state in states.EXCEPTION_STATES and state != states.RETRY:
        if isinstance(result.result, WorkerLostError):
            return NotJoined
        raise result.result
    # A retry may come much later, but one whose message is lost never comes.
    _join_again(task, key, joins, task.lock_options.queue_ttl if state == states.RETRY else _RESULT_GRACE)
    return NotJoined


def _join_again(task: "SingletonTask", key: str, joins: str, patience: float) -> None:
    """Come again, unless the run that was joined has died: it has had no lock for as long as *patience*.

    Raises:
        Retry: It comes again.
    """
    joined = [holder for holder in store_of(task.app).holders(key) if holder.task_id == joins]
    if joined:
        join(task, joined[0], free_since=None)
    free_since = history(task.request).get("free_since") or time.time()
    if time.time() - free_since < patience:
        join(task, former_holder(key, joins), free_since=free_since)
