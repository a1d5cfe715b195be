"""What has become of a call: whether it holds or waits, how it has ended, in whose favour and why."""

from dataclasses import dataclass
from typing import Any

from celery import Celery, states

from celery_singleton_lock.operations.inventory import Locks, Row, in_order, rows_of


@dataclass(frozen=True)
class Call:
    """A call, as the result backend and the locks know it.

    Attributes:
        task_id: Its task id.
        state: Its state; `PENDING` also if nothing is known, None if results cannot be read.
        reason: Why it was not done, in a word, or None.
        key: The lock key that its result names.
        holder_task_id: To which call the work was left.
        text: What its result says.
        rows: Where it holds a lock, or has left a mark.
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

    def as_json(self) -> dict[str, Any]:
        """In the words of the docs."""
        return {
            "task_id": self.task_id,
            "state": self.state,
            "reason": self.reason,
            "key": self.key,
            "holder_task_id": self.holder_task_id,
            "locks": [row.as_json() for row in self.rows],
        }


def call_of(app: Celery, locks: Locks, task_id: str) -> Call:
    """Look at the result of a call, and for its locks.

    Raises:
        StoreError: No answer in time.
    """
    found = (row for survey in locks.surveys() for row in rows_of(survey) if row.task_id == task_id)
    rows = tuple(in_order(found))
    try:
        kept = app.backend.get_task_meta(task_id)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises, or that there is none)
        return Call(task_id, None, rows=rows, problem=f"{type(error).__name__}: {error}".partition("\n")[0])
    state, result = kept["status"], kept.get("result")
    if not isinstance(result, BaseException):
        return Call(task_id, state, rows=rows)
    return Call(
        task_id,
        state,
        reason=getattr(result, "reason", None),
        key=getattr(result, "key", None),
        holder_task_id=getattr(result, "holder_task_id", None),
        text=str(result) or type(result).__name__,
        rows=rows,
    )
