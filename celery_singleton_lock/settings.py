"""Which store of locks an app uses."""

import ssl
from typing import Any
from urllib.parse import parse_qsl, urlencode
from weakref import WeakKeyDictionary

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores import store_from_url
from celery_singleton_lock.stores.base import Store

_LOCATIONS = ("redis://", "rediss://", "redis+socket://", "unix://")
_stores: WeakKeyDictionary[Celery, Store] = WeakKeyDictionary()


def store_of(app: Celery) -> Store:
    """The app's store of locks, opened at first use.

    It is `singleton_lock_url`, else the result backend if that is Redis, else
    the broker if that is Redis.

    Raises:
        ConfigurationError: None of the three is a Redis this library can use.
    """
    try:
        return _stores[app]
    except KeyError:
        pass
    _refuse_later_settings(app)
    url, options = _location(app)
    store = store_from_url(_redis_py_url(url), {**options, **app.conf.get("singleton_lock_client_options", {})})
    return _stores.setdefault(app, store)


def check_pool(app: Celery, pool: type) -> None:
    """Return if the app's store serves a worker with that pool.

    Raises:
        ConfigurationError: The store is the memory of one process, and the pool has several.
    """
    from celery.concurrency.prefork import TaskPool  # noqa: PLC0415 (of no use but in a worker)

    url = app.conf.get("singleton_lock_url")
    if isinstance(url, str) and url.startswith("memory:") and issubclass(pool, TaskPool):
        raise ConfigurationError(
            f"singleton_lock_url={url!r} keeps locks in the memory of one process, and the processes of the pool "
            "'prefork' would each have their own; give the URL of a server, such as 'redis://localhost:6379/0', or "
            "start the worker with --pool threads, solo, gevent or eventlet"
        )


def _location(app: Celery) -> tuple[str, dict[str, Any]]:
    url = app.conf.get("singleton_lock_url")
    if url is not None:
        if not isinstance(url, str):
            raise ConfigurationError(
                "singleton_lock_url: a list of stores is not available in this version; give one URL as text"
            )
        return url, {}
    for url, tls in (
        (app.conf.result_backend, app.conf.get("redis_backend_use_ssl")),
        (app.conf.broker_write_url or app.conf.broker_url, app.conf.get("broker_use_ssl")),
    ):
        # Celery takes a list, or several joined by semicolons, to fail over between brokers.
        first = url[0] if isinstance(url, list | tuple) and url else url
        first = first.partition(";")[0] if isinstance(first, str) else ""
        if first.startswith(_LOCATIONS):
            if isinstance(tls, dict):
                return first.replace("redis://", "rediss://", 1), {
                    name: _redis_py(value) for name, value in tls.items()
                }
            return first, {}
    raise ConfigurationError(
        "singleton_lock_url is not set, and neither the result backend nor the broker is Redis; "
        "set app.conf.singleton_lock_url, for example to 'redis://localhost:6379/0'"
    )


def _refuse_later_settings(app: Celery) -> None:
    if app.conf.get("singleton_lock_replicas", 0) != 0:
        raise ConfigurationError("singleton_lock_replicas is not available in this version; leave it at 0")


def _redis_py_url(url: str) -> str:
    """*url* with Celery's spellings of query arguments changed into redis-py's."""
    base, _, query = url.partition("?")
    names = {"virtual_host": "db"}
    arguments = [(names.get(name, name), _redis_py(value)) for name, value in parse_qsl(query)]
    return f"{base}?{urlencode(arguments)}" if arguments else url


def _redis_py(value: Any) -> Any:
    """Celery says CERT_NONE, in settings and in URLs, where redis-py says none."""
    return value.removeprefix("CERT_").lower() if value in ssl.VerifyMode.__members__ else value
