"""Ending what a call has left in the store, once its message has ended for good."""

from collections.abc import Mapping
from typing import Any

from celery import Celery, Task, states
from celery.exceptions import Reject

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.leftovers import leftovers
from celery_singleton_lock.runs.message import Notes
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Claim

_PATIENCE = 60.0


def unmark(store: Store, key: str, task_id: str, *, returns: bool = False) -> None:
    """End it now, or in the background if the store does not answer."""
    marks = Marks(store, key, task_id, returns=returns)
    if not marks.release_again():
        leftovers.add(marks)


def unmark_later(store: Store, key: str, task_id: str, *, returns: bool = False) -> None:
    """End it in the background: a main process waits for no store."""
    leftovers.add(Marks(store, key, task_id, returns=returns))


def unmark_unread(app: Celery, headers: Mapping[str, Any]) -> None:
    """End in the background what a call has left whose message a worker has thrown away unread.

    Raises:
        Exception: Whatever comes of headers that are no task's, or not ours.
    """
    notes = Notes.of(headers, headers.get("id"))
    if notes.key:
        unmark_later(store_of(app), notes.key, str(headers["id"]), returns=notes.crowds)


def unmark_unstarted(task: Task, state: str | None, retval: Any) -> None:
    """End it for the present request, which was refused before it came to its lock, by `before_start` say."""
    request, is_requeued = task.request, isinstance(retval, Reject) and retval.requeue and task.acks_late
    if state == states.RETRY or is_requeued:
        return
    try:
        notes = Notes() if request.called_directly else Notes.of(request.headers, request.id)
    except ConfigurationError:
        # Its result tells already.
        return
    if notes.key and (task.lock_options.unique_in_queue or notes.asked or notes.crowds):
        unmark(store_of(task.app), notes.key, request.id, returns=notes.crowds)


class Marks:
    """What one call has left, as something to give back; see `leftovers`."""

    ttl = _PATIENCE

    def __init__(self, store: Store, key: str, task_id: str, *, returns: bool) -> None:
        self.key = key
        self._store = store
        self.task_id = task_id
        self._returns = returns

    def release_again(self) -> bool:
        """Try; True once answered."""
        try:
            self._store.unmark(self.key, self.task_id, returns=self._returns)
        except StoreError:
            return False
        return True


class LateMarker:
    """The done marker of a run whose acknowledgement may be lost, as something to leave; see `leftovers`."""

    ttl = _PATIENCE

    def __init__(self, store: Store, claim: Claim, attempt: int, kept: float) -> None:
        self.key = claim.key
        self.task_id = claim.facts.task_id
        self._store = store
        self._marker = claim.marker
        self._attempt = attempt
        self._kept = kept

    def release_again(self) -> bool:
        """Try; True once answered."""
        try:
            self._store.mark_done(self._marker, self._attempt, "stored", self._kept)
        except StoreError:
            return False
        return True
