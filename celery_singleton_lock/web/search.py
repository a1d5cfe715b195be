"""Rows by the name of their lock."""

import fnmatch
from collections.abc import Sequence

from celery_singleton_lock.operations.inventory import Row
from celery_singleton_lock.stores.base import lock_name_of

_OF_GLOBS = set("*?[")


def matching(rows: Sequence[Row], pattern: str) -> list[Row]:
    """The rows whose lock name matches a glob, or contains a text that is no glob."""
    if not pattern:
        return list(rows)
    glob = pattern if _OF_GLOBS & set(pattern) else f"*{pattern}*"
    return [row for row in rows if fnmatch.fnmatchcase(lock_name_of(row.key), glob)]
