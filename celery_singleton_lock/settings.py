"""Which store of locks an app uses."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.options import faults_in_settings, refuse
from celery_singleton_lock.stores import SENTINEL, in_redis_py, one_url, store_from_url
from celery_singleton_lock.stores.redis.store import Store

_SOCKETS = ("redis+socket://", "unix://")
_LOCATIONS = ("redis://", "rediss://", *_SOCKETS, SENTINEL)
# The port at which Celery's result backend looks for sentinels without a port in the URL.
_PORT_OF_RESULTS = 6379
# The transport options that Celery reads to find the master.
_OF_SENTINEL = ("master_name", "min_other_sentinels", "sentinel_kwargs")
# With the URL that was set when it was opened.
_stores: WeakKeyDictionary[Celery, tuple[Any, Store]] = WeakKeyDictionary()


def store_of(app: Celery) -> Store:
    """The app's store of locks, opened at first use.

    It is `singleton_lock_url`, else the result backend if that is Redis, else
    the broker if that is Redis. If `app.conf.singleton_lock_url` is set again,
    the next call finds the new store.

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
    url, options = _location(app)
    own = _client_options(app)
    if "username" in own or "password" in own:
        # The provider belongs to the other user and password, and not to these.
        options.pop("credential_provider", None)
    return store_from_url(url, {**options, **own}, _replicas(app))


def _location(app: Celery) -> tuple[str, dict[str, Any]]:
    url = app.conf.get("singleton_lock_url")
    if url is not None:
        return one_url(url), {}
    conf = app.conf
    of_results, of_broker = conf.result_backend, conf.broker_write_url or conf.broker_url
    for url, whose, tls, transport, port in (
        (
            of_results,
            _user_of_results(app, of_results),
            conf.get("redis_backend_use_ssl"),
            conf.get("result_backend_transport_options"),
            _PORT_OF_RESULTS,
        ),
        (
            of_broker,
            _given(username=conf.get("broker_user"), password=conf.get("broker_password")),
            conf.get("broker_use_ssl"),
            conf.get("broker_transport_options"),
            None,
        ),
    ):
        # Celery takes a list, or several joined by semicolons, to fail over between brokers.
        first = url[0] if isinstance(url, list | tuple) and url else url
        first = first.partition(";")[0] if isinstance(first, str) else ""
        if first.startswith(SENTINEL):
            parts = ";".join(part for part in url if isinstance(part, str)) if isinstance(url, list | tuple) else url
            return parts, {**whose, **_sentinel_options(tls, transport, port)}
        if first.startswith(_LOCATIONS):
            if isinstance(tls, dict):
                whose |= {name: in_redis_py(value) for name, value in tls.items()}
                return first.replace("redis://", "rediss://", 1), whose
            return first, whose
    raise ConfigurationError(
        "singleton_lock_url is not set, and neither the result backend nor the broker is Redis; "
        "set app.conf.singleton_lock_url, for example to 'redis://localhost:6379/0'"
    )


def _user_of_results(app: Celery, url: Any) -> dict[str, Any]:
    """The settings that Celery's result backend uses if the URL does not say otherwise."""
    get = app.conf.get
    return _given(
        username=get("redis_username"),
        password=get("redis_password"),
        credential_provider=get("redis_backend_credential_provider"),
        # Over TCP the database is that of the URL, or 0.
        db=get("redis_db") if isinstance(url, str) and url.startswith(_SOCKETS) else None,
    )


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def _sentinel_options(tls: Any, transport: Any, port: int | None) -> dict[str, Any]:
    options = {name: transport[name] for name in _OF_SENTINEL if name in (transport or {})}
    if port is not None:
        options["default_port"] = port
    if isinstance(options.get("sentinel_kwargs"), dict):
        options["sentinel_kwargs"] = {name: in_redis_py(value) for name, value in options["sentinel_kwargs"].items()}
    if isinstance(tls, dict):
        options |= {"ssl": True, **{name: in_redis_py(value) for name, value in tls.items()}}
    return options


def _client_options(app: Celery) -> Mapping[str, Any]:
    options = app.conf.get("singleton_lock_client_options", {})
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            # Do not quote the value: there may be a password in it.
            f"singleton_lock_client_options=<a {type(options).__name__}> is not allowed: give a dict of arguments for "
            "redis-py's connections, such as {'ssl_ca_certs': 'ca.pem'}"
        )
    return options


def _replicas(app: Celery) -> int:
    number: Any = app.conf.get("singleton_lock_replicas", 0)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigurationError(
            f"singleton_lock_replicas={number!r} is not allowed: give the number of replicas that have to acknowledge "
            "each grant and each renewal, or 0"
        )
    return number
