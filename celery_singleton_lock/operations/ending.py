"""The state of a call: whether it holds or waits, how it has ended, for which other call and why."""

from dataclasses import dataclass
from typing import Any

from celery import Celery, states

from celery_singleton_lock.errors import LockHeld, LockLost
from celery_singleton_lock.operations.inventory import Locks, Row, in_order, rows_about
from celery_singleton_lock.runs.revoked import CallRevoked

_NOW = {"held": "holds the lock", "waiting": "waits for the lock", "queued": "is queued", "next": "is next"}


@dataclass(frozen=True)
class Call:
    """A call, as the result backend and the locks know it.

    Attributes:
        task_id: Its task id.
        state: Its state; `PENDING` also if nothing is known, None if results cannot be read.
        reason: Why it was not done, in a word, or None.
        key: The lock key that its result names.
        holder_task_id: Task id of the call that does the work instead; while it comes again, of the one it waits for.
        text: What its result says.
        rows: Where it holds a lock, waits for one, or has left a mark.
        problem: Why results cannot be read.
    """

    task_id: str
    state: str | None
    reason: str | None = None
    key: str | None = None
    holder_task_id: str | None = None
    text: str | None = None
    rows: tuple[Row, ...] = ()
    problem: str | None = None

    @property
    def is_known(self) -> bool:
        """Anything is known of it."""
        return bool(self.rows) or self.state not in (None, states.PENDING)

    @property
    def now(self) -> str | None:
        """What it does, in words, unless it has ended or nothing is known."""
        in_a_lock = [_NOW[row.state] for row in self.rows if row.state in _NOW]
        if in_a_lock:
            return in_a_lock[0]
        if self.state != states.RETRY:
            return None
        if self.key is None:
            return "comes again"
        return f"comes again, and waits for {self.holder_task_id or 'the lock'}"

    @property
    def left_to(self) -> str | None:
        """Task id of the call that does the work instead."""
        return None if self.state == states.RETRY else self.holder_task_id

    def as_json(self) -> dict[str, Any]:
        """As JSON, with the names of the docs."""
        return {
            "task_id": self.task_id,
            "state": self.state,
            "reason": self.reason,
            "key": self.key,
            "holder_task_id": self.holder_task_id,
            "locks": [row.as_json() for row in self.rows],
            "text": self.text,
        }


def call_of(app: Celery, locks: Locks, task_id: str) -> Call:
    """Look at the result of a call, and for its locks.

    Raises:
        StoreError: No answer in time.
    """
    found = (row for survey in locks.surveys(task_id=task_id) for row in rows_about(survey, task_id))
    rows = tuple(in_order(found))
    try:
        kept = app.backend.get_task_meta(task_id)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises, or that there is none)
        return Call(task_id, None, rows=rows, problem=f"{type(error).__name__}: {error}".partition("\n")[0])
    state, result = kept["status"], kept.get("result")
    # A body may return an exception, which is a result as any other.
    if state not in states.EXCEPTION_STATES or not isinstance(result, BaseException):
        return Call(task_id, state, rows=rows)
    return Call(task_id, state, text=str(result) or type(result).__name__, rows=rows, **_facts_of(result, state))


def _facts_of(result: BaseException, state: str) -> dict[str, str | None]:
    """The data of an error of ours; an error of others may have attributes of the same names."""
    if not isinstance(result, CallRevoked | LockHeld | LockLost):
        return {}
    holder = getattr(result, "holder_task_id", None)
    return {
        # A call that comes again may still be done.
        "reason": None if state == states.RETRY else str(result.reason),
        "key": str(result.key),
        "holder_task_id": None if holder is None else str(holder),
    }
