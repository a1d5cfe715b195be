"""Which store each `Lock` uses inside the blocks of the kit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from celery import Celery

from celery_singleton_lock.lock import Lock
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.redis.store import Store

# Whose block it is, and its store; the innermost last. That of `disabled()` is everybody's.
_entered: list[tuple["Celery[Any] | None", Store]] = []


@contextmanager
def locks_in(store: Store, app: "Celery[Any] | None" = None) -> Iterator[None]:
    """Have each `Lock` use the store of a block, whatever its own is: that of *app* this one, that of all apps if None.

    A `Lock` whose app has no block uses the store of the innermost.
    """
    entry = app, store
    _entered.append(entry)
    try:
        with patch.object(Lock, "_store", property(lambda lock: store_of_locks(lock._app))):  # noqa: SLF001
            yield
    finally:
        _entered.remove(entry)


def store_of_locks(app: "Celery[Any]") -> Store:
    """The store of each `Lock` of *app* that has no URL of its own; inside a block, of every one."""
    stores = dict(_entered)
    return stores.get(None) or stores.get(app) or (_entered[-1][1] if _entered else store_of(app))
