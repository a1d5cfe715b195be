"""The names that the examples in the docs take for granted."""

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

from celery import Celery

from celery_singleton_lock import Lock, SingletonTask

__all__ = [
    "Lock",
    "SingletonTask",
    "ThreadPoolExecutor",
    "app",
    "asyncio",
    "contextvars",
    "count_everything",
    "fetch",
    "lock",
    "page",
    "save",
    "self",
]

app = Celery("shop")
lock = Lock("stock")
page = "a page"
self = SingletonTask()


def fetch(supplier_id: int) -> list[str]:
    return [f"{page} of {supplier_id}"]


def save(page: str, lease: object = None, fence: int = 0) -> None: ...


def count_everything(fence: int) -> None: ...
