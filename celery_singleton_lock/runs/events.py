"""Celery's events, for monitors of a worker."""

import logging
from typing import Any

from celery import Task
from kombu.exceptions import OperationalError

logger = logging.getLogger("celery_singleton_lock")


def send_event(task: Task, key: str, task_id: str, event: str, facts: dict[str, Any]) -> None:
    """Send it; a broker that is away costs the event, and nothing else."""
    try:
        task.send_event(event, **facts)
    except OperationalError as error:
        logger.warning("lock.untold key=%s task_id=%s: no event: %s", key, task_id, error)
