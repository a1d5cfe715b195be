"""Task ids as text."""

from typing import Any


def text_of(task_id: Any) -> str:
    """*task_id* as the text that the store has: Celery takes a `uuid.UUID`, or a subclass of `str`, as well."""
    return str.__str__(task_id) if isinstance(task_id, str) else str(task_id)
