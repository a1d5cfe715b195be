"""Which store of locks an app uses."""

import re
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery

from celery_singleton_lock.definition.options import as_set, count, refuse, setting
from celery_singleton_lock.definition.spelling import faults_in_settings
from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores import SENTINEL, in_redis_py, one_url, store_from_url
from celery_singleton_lock.stores.redis.store import Store

_SOCKETS = ("redis+socket://", "unix://")
_LOCATIONS = ("redis://", "rediss://", *_SOCKETS)
# The port at which Celery's result backend looks for sentinels without a port in the URL.
_PORT_OF_RESULTS = 6379
# The transport options that Celery reads to find the master.
_OF_SENTINEL = ("master_name", "min_other_sentinels", "sentinel_kwargs")
# A page reads all of it at once.
_LONGEST_HISTORY = 10_000
# With the URL that was set when it was opened.
_stores: WeakKeyDictionary[Celery, tuple[Any, Store]] = WeakKeyDictionary()
stores_of_locks: list[Callable[[Celery], Store]] = []
"""Of the blocks of `testing`: the last one says which store a `Lock` of an app has, whatever its `url`."""


def store_of(app: Celery) -> Store:
    """The app's store of locks, opened at first use.

    It is `singleton_lock_url`, else the result backend if that is Redis, else the broker if that is Redis. If
    `app.conf.singleton_lock_url` is set again, the next call finds the new store.

    Raises:
        ConfigurationError: None of the three is a Redis this library can use, or there is no such setting.
    """
    # A search of all settings would slow each task.
    assigned = app.conf.changes.get("singleton_lock_url")
    before, store = _stores.get(app, (None, None))
    if store is None or before != assigned:
        refuse(faults_in_settings(app))
        store = open_store(app)
        _stores[app] = assigned, store
    return store


def open_store(app: Celery) -> Store:
    """The app's store of locks, with connections of its own.

    Raises:
        ConfigurationError: There is none that this library can use.
    """
    try:
        return _opened(app)
    except ConfigurationError as error:
        raise ConfigurationError(as_set(app, str(error))) from error.__cause__


def _opened(app: Celery) -> Store:
    url, options = _location(app)
    own: Any = setting(app, "singleton_lock_client_options", {})
    if not isinstance(own, Mapping):
        raise ConfigurationError(
            # Do not quote the value: there may be a password in it.
            f"singleton_lock_client_options=<a {type(own).__name__}> is not allowed: give a dict of arguments for "
            "redis-py's connections, such as {'ssl_ca_certs': 'ca.pem'}"
        )
    replicas: Any = setting(app, "singleton_lock_replicas", 0)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        raise ConfigurationError(
            f"singleton_lock_replicas={replicas!r} is not allowed: give the number of replicas that have to "
            "acknowledge each grant and each renewal, or 0"
        )
    history: Any = setting(app, "singleton_lock_history", Store.history)
    history = count("singleton_lock_history", history, least=0, most=_LONGEST_HISTORY)
    if "username" in own or "password" in own:
        # The provider belongs to the other user and password, and not to these.
        options.pop("credential_provider", None)
    store = store_from_url(url, {**_in_redis_py(options), **own}, replicas)
    store.history = history
    return store


def has_password(url: Any) -> bool:
    """There is a password in *url*, which Celery shows as it is: it masks settings by their names."""
    return isinstance(url, str) and re.search(r"://[^/@;]*:[^/@;]+@|[?&]password=", url) is not None


def _location(app: Celery) -> tuple[str, dict[str, Any]]:
    conf = app.conf
    get = conf.get
    if (url := setting(app, "singleton_lock_url")) is not None:
        return one_url(url), {}
    results = _as_text(conf.result_backend)
    broker = _as_text(conf.broker_write_url or conf.broker_url)
    # What Celery uses if the URL does not say otherwise.
    of_results = {
        "username": get("redis_username"),
        "password": get("redis_password"),
        "credential_provider": get("redis_backend_credential_provider"),
        # Over TCP the database is that of the URL, or 0.
        "db": get("redis_db") if results.startswith(_SOCKETS) else None,
        "default_port": _PORT_OF_RESULTS if results.startswith(SENTINEL) else None,
    }
    of_broker = {"username": get("broker_user"), "password": get("broker_password")}
    for url, theirs, tls, transport in (
        (results, of_results, get("redis_backend_use_ssl"), get("result_backend_transport_options")),
        (broker, of_broker, get("broker_use_ssl"), get("broker_transport_options")),
    ):
        has_tls = isinstance(tls, dict)
        options = {name: value for name, value in theirs.items() if value} | (tls if has_tls else {})
        if url.startswith(SENTINEL):
            options |= {name: transport[name] for name in _OF_SENTINEL if name in (transport or {})}
            if has_tls:
                options["ssl"] = True
            return url, options
        if url.startswith(_LOCATIONS):
            first = url.partition(";")[0]
            return first.replace("redis://", "rediss://", 1) if has_tls else first, options
    raise ConfigurationError(
        "singleton_lock_url is not set, and neither the result backend nor the broker is Redis; "
        "set app.conf.singleton_lock_url, for example to 'redis://localhost:6379/0'"
    )


def _as_text(url: Any) -> str:
    """Celery takes a list of URLs, or several joined by semicolons, to fail over between brokers."""
    parts = url if isinstance(url, list | tuple) else [url]
    return ";".join(part for part in parts if isinstance(part, str))


def _in_redis_py(value: Any) -> Any:
    """A value of Celery's settings as redis-py has it, also inside `sentinel_kwargs`."""
    if isinstance(value, dict):
        return {name: _in_redis_py(each) for name, each in value.items()}
    return in_redis_py(value)
