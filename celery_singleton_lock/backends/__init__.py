"""Stores of locks; the scheme of the URL picks one."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from celery_singleton_lock.backends.base import Backend
from celery_singleton_lock.backends.redis import RedisBackend
from celery_singleton_lock.errors import ConfigurationError

_REDIS_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "unix": "unix",
    "redis+socket": "unix",
}
_LATER_SCHEMES = ("sentinel", "redis+cluster", "rediss+cluster", "memory")


def backend_from_url(url: str, options: Mapping[str, Any] | None = None) -> Backend:
    """Open the store at *url*; nothing is sent to it yet.

    Arguments:
        url: `redis://`, `rediss://` (TLS), `valkey://`, `valkeys://`, `unix://`
            or `redis+socket://`.
        options: Further arguments for redis-py's connections, such as `ssl_ca_certs`.

    Raises:
        ConfigurationError: The scheme is unknown, or the URL cannot be read.
    """
    scheme = urlsplit(url).scheme
    if scheme in _LATER_SCHEMES:
        raise ConfigurationError(f"singleton_lock_url: {scheme}:// is not available in this version; use redis://")
    if scheme not in _REDIS_SCHEMES:
        raise ConfigurationError(
            f"singleton_lock_url: unknown scheme {scheme!r}; allowed are {', '.join(f'{s}://' for s in _REDIS_SCHEMES)}"
        )
    return RedisBackend(_REDIS_SCHEMES[scheme] + url[len(scheme) :], options or {})
