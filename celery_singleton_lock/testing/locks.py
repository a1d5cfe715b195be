"""The store of an app's `Lock`s while the app has another one: each `Lock` keeps the store it was made with."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.lock import Lock
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import Store

_guard = threading.RLock()
_had: "WeakKeyDictionary[Celery[Any], WeakSet[Store]]" = WeakKeyDictionary()
"""The stores that each app has had; a `Lock` belongs to the app whose store it was made with."""
_instead: "dict[Celery[Any], list[Store]]" = {}
"""The stores that replace those of apps at present, the innermost last."""
_made_inside: WeakSet[Lock] = WeakSet()


class _StoreNow:
    """Stands for `Lock._store`."""

    def __get__(self, lock: Any, cls: Any) -> Any:
        if lock is None:
            return self
        own = vars(lock)["_store"]
        return next((stores[-1] for app, stores in list(_instead.items()) if own in _had[app]), own)

    def __set__(self, lock: Any, store: Any) -> None:
        vars(lock)["_store"] = store
        _made_inside.add(lock)


def know_store_of(app: "Celery[Any]") -> None:
    """Remember the store that the app has; there may be none."""
    with suppress(ConfigurationError):
        _had.setdefault(app, WeakSet()).add(store_of(app))


@contextmanager
def followed_by_locks(app: "Celery[Any]", store: Store) -> Iterator[None]:
    """Have the `Lock`s of the app use *store* inside, those that were made before as well."""
    with _guard:
        _had.setdefault(app, WeakSet()).add(store)
        _instead.setdefault(app, []).append(store)
        Lock._store = _StoreNow()  # type: ignore[assignment]  # noqa: SLF001 (the library itself does no work for it)
    try:
        yield
    finally:
        with _guard:
            _instead[app].remove(store)
            if not _instead[app]:
                del _instead[app]
            if not _instead:
                del Lock._store  # type: ignore[misc]  # noqa: SLF001


def return_locks(app: "Celery[Any]", store: Store) -> None:
    """Give the locks that were made inside the store that the app has by now."""
    with suppress(ConfigurationError):
        for lock in [lock for lock in _made_inside if vars(lock)["_store"] is store]:
            vars(lock)["_store"] = store_of(app)
