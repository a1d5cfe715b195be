"""Ending what a call has left in the store, once its message has ended for good."""

from collections.abc import Mapping
from typing import Any

from celery import Celery, Task, states
from celery.exceptions import Reject

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.leftovers import leftovers
from celery_singleton_lock.runs.ids import text_of
from celery_singleton_lock.runs.message import Notes
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.records import Claim

_PATIENCE = 60.0


def unmark(
    store: Store, key: str, task_id: str, *, returns: bool = False, stays_quiet: bool = False, may_arrive: bool = False
) -> None:
    """End it now, or in the background if the store does not answer; see `Leftovers.add` for *may_arrive*."""
    marks = Marks(store, key, task_id, returns=returns, stays_quiet=stays_quiet)
    if not marks.release_again() or may_arrive:
        leftovers.add(marks, may_arrive=may_arrive)


def unmark_later(
    store: Store, key: str, task_id: str, *, returns: bool = False, stays_quiet: bool = False, may_arrive: bool = False
) -> None:
    """End it in the background: a main process waits for no store."""
    leftovers.add(Marks(store, key, task_id, returns=returns, stays_quiet=stays_quiet), may_arrive=may_arrive)


def unmark_unread(app: Celery, headers: Mapping[str, Any]) -> None:
    """In the background, end the marks of a call whose message a worker has thrown away unread.

    Raises:
        Exception: Any error that headers can cause that are not a task's, or not ours.
    """
    notes = Notes.of(headers, headers.get("id"))
    if notes.key and notes.left_something:
        unmark_later(store_of(app), notes.key, str(headers["id"]), returns=notes.crowds)


def unmark_unstarted(task: Task, state: str | None, retval: Any) -> None:
    """End it for the present request, which was refused before it asked for its lock, for example by `before_start`."""
    request, is_requeued = task.request, isinstance(retval, Reject) and retval.requeue and task.acks_late
    if state == states.RETRY or is_requeued:
        return
    try:
        notes = Notes() if request.called_directly else Notes.of(request.headers, request.id)
    except ConfigurationError:
        # Its result tells already.
        return
    if notes.key and notes.left_something:
        unmark(store_of(task.app), notes.key, text_of(request.id), returns=notes.crowds)


class Marks:
    """The marks of one call, as something to give back; see `leftovers`."""

    ttl = _PATIENCE

    def __init__(self, store: Store, key: str, task_id: str, *, returns: bool, stays_quiet: bool = False) -> None:
        self.key = key
        self.store = store
        self.task_id = task_id
        self._returns, self._stays_quiet = returns, stays_quiet

    def release_again(self) -> bool:
        """Try; True once answered."""
        try:
            self.store.unmark(self.key, self.task_id, returns=self._returns, quiet=not self._stays_quiet)
        except StoreError:
            return False
        return True


class LateMarker:
    """The done marker of a run whose acknowledgement may be lost, as something to leave; see `leftovers`."""

    ttl = _PATIENCE

    def __init__(self, store: Store, claim: Claim, attempt: int, kept: float) -> None:
        self.key = claim.key
        self.task_id = claim.facts.task_id
        self.store = store
        self._marker = claim.marker
        self._attempt = attempt
        self._kept = kept

    def release_again(self) -> bool:
        """Try; True once answered."""
        try:
            self.store.mark_done(self._marker, self._attempt, "stored", self._kept)
        except StoreError:
            return False
        return True
