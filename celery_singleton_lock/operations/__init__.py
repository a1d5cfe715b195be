"""The commands of operators, `celery -A proj singleton`, and `break_marks` for programs."""

from celery_singleton_lock.operations.breaking import break_marks

__all__ = ["break_marks"]
