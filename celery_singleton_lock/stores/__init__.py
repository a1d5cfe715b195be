"""Opens the store that a URL names."""

import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from celery_singleton_lock.errors import DOCS, ConfigurationError
from celery_singleton_lock.stores.redis.connection import unreadable
from celery_singleton_lock.stores.redis.store import Store

SENTINEL = "sentinel://"

_IN_REDIS_PY = {"valkey": "redis", "valkeys": "rediss", "redis+socket": "unix"}
_SCHEMES = ("redis", "rediss", "unix", "sentinel", "redis+cluster", "rediss+cluster", *_IN_REDIS_PY, "memory")
_OF_SEVERAL = ("sentinel:", "redis+cluster:", "rediss+cluster:")  # their URLs may name several servers
_ANOTHER = re.compile(r";\s*[a-z+]+://")
in_memory: dict[str, Store] = {}
_shared: dict[str, Store] = {}


def shared_store(url: str) -> Store:
    url = one_url(url)
    return _shared.get(url) or _shared.setdefault(url, store_from_url(url))


def one_url(given: Any) -> str:
    """Check and strip a `singleton_lock_url`."""
    several = isinstance(given, list | tuple | set | frozenset) and len(given) > 1
    if several or (isinstance(given, str) and _ANOTHER.search(given) and not given.startswith(_OF_SEVERAL)):
        raise ConfigurationError(
            "singleton_lock_url: several stores are not allowed, so give one URL. If a server may die, give "
            f"sentinel:// and singleton_lock_replicas: see {DOCS}how-to/topologies/. A list of independent masters "
            "does not help: their majority gives a lock to two holders as soon as one loses data or its clock is set"
        )
    if not isinstance(given, str) or not given.strip():
        # Do not show the value, which may have a password.
        what = "an empty text" if isinstance(given, str) else f"a {type(given).__name__}"
        raise ConfigurationError(
            f"singleton_lock_url=<{what}> is not allowed: give one URL as text, such as 'redis://localhost:6379/0'; "
            "None stands for the Redis of the result backend or the broker"
        )
    return given.strip()


def store_from_url(url: str, options: Mapping[str, Any] | None = None, replicas: int = 0) -> Store:
    """Open the store at *url* without connecting to it."""
    url = url.strip()
    begins, found, rest = url.partition("://")
    scheme = begins.lower() if found else ""
    # `urlsplit` would silently drop a newline.
    if not url.isprintable():
        raise unreadable()
    if scheme == "memory":
        try:
            from celery_singleton_lock.stores.memory import MemoryStore  # noqa: PLC0415 (needs an extra)
        except ImportError as error:
            raise extra_is_missing("memory://", error) from error
        return in_memory.get(url) or in_memory.setdefault(url, MemoryStore())
    rest = ";".join(map(_part_in_redis_py, rest.split(";")))
    if scheme not in _SCHEMES:
        allowed = ", ".join(f"{known}://" for known in _SCHEMES)
        raise ConfigurationError(f"singleton_lock_url: unknown scheme {scheme!r}; allowed are {allowed}")
    return Store(f"{_IN_REDIS_PY.get(scheme, scheme)}://{rest}", options or {}, replicas)


def extra_is_missing(what: str, error: ImportError) -> ConfigurationError:
    return ConfigurationError(f'{what} needs more packages ({error}): pip install "celery-singleton-lock[testing]"')


def in_redis_py(value: Any) -> Any:
    """Replace Celery's names of TLS checks by those of redis-py: `CERT_NONE` by `none`."""
    if isinstance(value, dict):
        return {name: in_redis_py(each) for name, each in value.items()}
    is_one = isinstance(value, str) and value in ssl.VerifyMode.__members__
    return value.removeprefix("CERT_").lower() if is_one else value


def _part_in_redis_py(part: str) -> str:
    base, _, query = part.partition("?")
    arguments = [("db" if name == "virtual_host" else name, in_redis_py(value)) for name, value in parse_qsl(query)]
    return f"{base}?{urlencode(arguments)}" if arguments else part
