"""Stores of locks; the scheme of the URL picks one."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.base import Store
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.redis.opening import unreadable
from celery_singleton_lock.stores.redis.sentinel_url import SCHEME
from celery_singleton_lock.stores.redis.store import RedisStore

SENTINEL = SCHEME

_REDIS_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "unix": "unix",
    "redis+socket": "unix",
    "sentinel": "sentinel",
}
_LATER_SCHEMES = ("redis+cluster", "rediss+cluster")
in_memory: dict[str, MemoryStore] = {}
"""The stores in the memory of this process, by their URL."""

_shared: dict[str, Store] = {}


def shared_store(url: str) -> Store:
    """The store at *url*, one and the same for all in this process who ask here.

    Raises:
        ConfigurationError: The scheme is unknown, or the URL cannot be read.
    """
    return _shared.get(url) or _shared.setdefault(url, store_from_url(url))


def store_from_url(url: str, options: Mapping[str, Any] | None = None, replicas: int = 0) -> Store:
    """Open the store at *url*; nothing is sent to it yet.

    Arguments:
        url: `redis://`, `rediss://` (TLS), `valkey://`, `valkeys://`, `unix://`,
            `redis+socket://`, `sentinel://` in one part or several, or `memory://` for
            locks of this process only, the same for all who give the same URL.
        options: Further arguments for redis-py's connections, such as `ssl_ca_certs`; for
            `sentinel://` the `master_name`, unless the URL ends with `?master_name=...`, and `sentinel_kwargs`.
        replicas: How many replicas have to have a grant and a renewal, before they count.

    Raises:
        ConfigurationError: The scheme is unknown, or the URL cannot be read.
    """
    try:
        # Of the first part alone.
        scheme = urlsplit(url.partition(";")[0]).scheme
    except ValueError:
        raise unreadable() from None
    if scheme == "memory":
        if replicas:
            raise ConfigurationError(
                f"singleton_lock_replicas={replicas} is not allowed: {url} has no replicas; leave it at 0"
            )
        return in_memory.setdefault(url, MemoryStore())
    if scheme in _LATER_SCHEMES:
        raise ConfigurationError(f"singleton_lock_url: {scheme}:// is not available in this version; use redis://")
    if scheme not in _REDIS_SCHEMES:
        allowed = ", ".join(f"{known}://" for known in (*_REDIS_SCHEMES, "memory"))
        raise ConfigurationError(f"singleton_lock_url: unknown scheme {scheme!r}; allowed are {allowed}")
    return RedisStore(_REDIS_SCHEMES[scheme] + url[len(scheme) :], options or {}, replicas)
