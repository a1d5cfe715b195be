"""The text that operators see beside the lock key of a call, if its task has a label."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

logger = logging.getLogger("celery_singleton_lock")


def label_of(task: Any, key: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The label of a call; empty if its task has none, or if it cannot be made, which is told and costs no call."""
    if task.lock_options.label is None:
        return ""
    try:
        label: str = task._lock_keys.label(args, kwargs)  # noqa: SLF001 (it is this library's)
    except SoftTimeLimitExceeded:
        # This error belongs to the run, so do not hide it.
        raise
    except Exception as error:  # noqa: BLE001 (arguments and their formats are the user's)
        why = f"{type(error).__name__}: {error}"
        logger.warning("lock.unlabelled key=%s task_id=%s: lock_label fails for this call (%.200s)", key, task_id, why)
        return ""
    return label
