"""The commands of operators, `celery -A proj singleton`, and what of them a program may call."""

from celery_singleton_lock.operations.breaking import break_marks

__all__ = ["break_marks"]
