"""The store of an app's locks, and checks for unknown options and settings."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from celery import Celery

from celery_singleton_lock.definition import options
from celery_singleton_lock.errors import DOCS, ConfigurationError
from celery_singleton_lock.stores import SENTINEL, in_redis_py, one_url, store_from_url
from celery_singleton_lock.stores.redis.store import Store

_SOCKETS = ("redis+socket://", "unix://")
_LOCATIONS = ("redis://", "rediss://", *_SOCKETS)
_PORT_OF_RESULTS = 6379  # Celery's default for a Sentinel of the result backend
_OF_SENTINEL = ("master_name", "min_other_sentinels", "sentinel_kwargs")
# The app's attribute for the pair (assigned URL, opened store).
_STORE = "_singleton_lock_store"
# The worker's hard and soft time limit, which Celery does not pass to pool processes.
limits_of_worker: list[float | None] = [None, None]
stores_of_locks: list[Callable[[Celery], Store]] = []
"""Filled by `testing`: the last function gives each `Lock` its store, whatever its `url`."""

_PREFIXES = ("lock_", "singleton_lock_")
# Names in other libraries for which `_nearest` would suggest a wrong option.
_MEANT = {
    **dict.fromkeys(("lock_timeout", "lock_expire", "lock_expires", "lock_expiration"), "lock_ttl"),
    "lock_blocking_timeout": "lock_wait_timeout",
}
_OF_OTHERS: Mapping[str, Mapping[str, str]] = {
    "celery-singleton": {
        "unique_on": "lock_key",
        "raise_on_duplicate": 'lock_on_conflict="raise"',
        "lock_expiry": "lock_queue_ttl",
        "singleton_backend_url": "singleton_lock_url",
        "singleton_backend_class": "singleton_lock_url",
        "singleton_backend_kwargs": "singleton_lock_client_options",
        "singleton_key_prefix": "singleton_lock_prefix",
        "singleton_lock_expiry": "singleton_lock_queue_ttl",
        "singleton_raise_on_duplicate": "singleton_lock_on_conflict",
    },
    "celery-once": {"once": "lock_key, lock_mode and others"},
    "celery-once-task": {
        "queue_lock": "lock_mode",
        "running_lock": "lock_mode",
        "queue_lock_timeout": "lock_queue_ttl",
        "running_lock_timeout": "lock_ttl, which is renewed while the body runs",
    },
    "celery-heimdall": {"heimdall": "lock_mode and others"},
}
_METHODS_OF_OTHERS: Mapping[str, Mapping[str, str]] = {
    "celery-singleton": {
        "generate_lock": "lock_key with a callable",
        "aquire_lock": "taken before the body",
        "lock_and_run": "taken before the body",
        "release_lock": "released after the body",
        "unlock": "released after the body",
        "get_existing_task_id": "lock_state(...)",
        "on_duplicate": "the signal lock_conflict",
    },
    "celery-once": {"get_key": "lock_key with a callable", "clear_lock": "released after the body"},
    "celery-once-task": {"_acquire_lock": "taken before the body", "_release_lock": "released after the body"},
    "celery-heimdall": {"setup_redis": "singleton_lock_url"},
}


def store_of(app: Celery) -> Store:
    """The store, opened at first use, and again after `app.conf.singleton_lock_url` was assigned."""
    # Reading `app.conf.singleton_lock_url` would search all settings, and slow each task.
    assigned = app.conf.changes.get("singleton_lock_url")
    before, store = getattr(app, _STORE, (None, None))
    if store is None or before != assigned:
        options.refuse(faults_in_settings(app))
        store = open_store(app)
        # The class of a user's app may refuse `setattr`.
        vars(app)[_STORE] = assigned, store
    return store


def open_store(app: Celery) -> Store:
    try:
        return _opened(app)
    except ConfigurationError as error:
        raise ConfigurationError(options.as_set(app, str(error))) from error.__cause__


def _opened(app: Celery) -> Store:
    url, arguments = _location(app)
    own: Any = options.setting(app, "singleton_lock_client_options", {})
    if not isinstance(own, Mapping):
        raise ConfigurationError(
            f"singleton_lock_client_options=<a {type(own).__name__}> is not allowed: give a dict of arguments for "
            "redis-py's connections, such as {'ssl_ca_certs': 'ca.pem'}"
        )
    replicas = options.count("singleton_lock_replicas", options.setting(app, "singleton_lock_replicas", 0), least=0)
    history: Any = options.setting(app, "singleton_lock_history", Store.history)
    history = options.count("singleton_lock_history", history, least=0, most=10_000)
    if "username" in own or "password" in own:
        # A provider from Celery's settings would override this username and password.
        arguments.pop("credential_provider", None)
    store = store_from_url(url, {**in_redis_py(arguments), **own}, replicas)
    store.history = history
    return store


def _location(app: Celery) -> tuple[str, dict[str, Any]]:
    get = app.conf.get
    if (url := options.setting(app, "singleton_lock_url")) is not None:
        return one_url(url), {}
    results = _as_text(app.conf.result_backend)
    broker = _as_text(app.conf.broker_write_url or app.conf.broker_url)
    of_results = {
        "username": get("redis_username"),
        "password": get("redis_password"),
        "credential_provider": get("redis_backend_credential_provider"),
        # Over TCP, Celery reads the database from the URL alone.
        "db": get("redis_db") if results.startswith(_SOCKETS) else None,
        "default_port": _PORT_OF_RESULTS if results.startswith(SENTINEL) else None,
    }
    of_broker = {"username": get("broker_user"), "password": get("broker_password")}
    for url, theirs, tls, transport in (
        (results, of_results, get("redis_backend_use_ssl"), get("result_backend_transport_options")),
        (broker, of_broker, get("broker_use_ssl"), get("broker_transport_options")),
    ):
        has_tls = isinstance(tls, dict)
        arguments = {name: value for name, value in theirs.items() if value} | (tls if has_tls else {})
        if url.startswith(SENTINEL):
            arguments |= {name: transport[name] for name in _OF_SENTINEL if name in (transport or {})}
            if has_tls:
                arguments["ssl"] = True
            return url, arguments
        if url.startswith(_LOCATIONS):
            first = url.partition(";")[0]
            return first.replace("redis://", "rediss://", 1) if has_tls else first, arguments
    raise ConfigurationError(
        "singleton_lock_url is not set, and neither the result backend nor the broker is Redis; "
        "set app.conf.singleton_lock_url, for example to 'redis://localhost:6379/0'"
    )


def _as_text(url: Any) -> str:
    parts = url if isinstance(url, list | tuple) else [url]
    return ";".join(part for part in parts if isinstance(part, str))


def faults_in_names(task: Any) -> Iterator[str]:
    """Attributes of the task's classes that look like an option and are none, or belong to another library.

    Overrides of a base's attribute are allowed. So are methods and properties, unless they are another library's.
    """
    cls = task.__class__
    ours = options.base_in(cls).__mro__
    for number, each in enumerate(cls.__mro__):
        if each in ours:
            continue
        # A class that Celery made of `@app.task(...)`, with the keywords as attributes.
        is_decorated = "_decorated" in vars(each)
        for name, value in vars(each).items():
            if any(name in vars(behind) for behind in cls.__mro__[number + 1 :]):
                continue
            fault = _of_others("a method", name, _METHODS_OF_OTHERS)
            if is_decorated and f"lock_{name}" in options.NAMES:
                fault = f"there is no option {name}; did you mean lock_{name}?"
            elif is_decorated or not hasattr(type(value), "__get__"):
                fault = fault or _fault_in_name(name)
            if fault:
                yield f"task {task.name}: {fault}"


def check_name(task: Any, name: str) -> None:
    if not hasattr(type(task), name) and (fault := _fault_in_name(name)):
        raise ConfigurationError(f"task {task.name}: {fault}")


def check_call_options(task: str, given: Mapping[str, Any]) -> None:
    for name in given:
        fault = _of_others("an option", name)
        if name.startswith(_PREFIXES) and not fault:
            fault = (
                f"{name} cannot be given with a call, because options belong to the task; write "
                f"`@app.task(base=SingletonTask, {_meant(name) or 'lock_...'}=...)`"
            )
        if fault and name not in (given.get("stamped_headers") or ()):
            raise ConfigurationError(f"task {task}: {fault}")


def faults_in_settings(app: Celery) -> Iterator[str]:
    namespace = options.as_celery_reads(app, "").lower()
    readable = {name: options.as_celery_reads(app, name) for name in options.SETTINGS}
    for written in map(str, app.conf):  # never the values, which may be secret or computed
        name = written.lower().removeprefix(namespace or "celery_")
        is_read = written in (name, options.as_celery_reads(app, name))
        # If Celery does not read this spelling, the name may be another program's: then require a longer prefix.
        if not name.startswith("singleton_" if is_read else ("singleton_lock_", "singleton_beat_")):
            continue
        option = name.removeprefix("singleton_")
        if name in readable:
            if not is_read:
                yield f"the setting {written} is not read; write {readable[name]}"
        elif fault := _of_others("a setting", name):
            if "celery_singleton" not in sys.modules:
                yield fault
        elif option in options.NAMES:
            yield f"there is no setting {written}; set {option} on each task"
        else:
            near = _nearest(name, options.SETTINGS)
            meant = readable.get(f"singleton_{_MEANT.get(option)}") or readable.get(near, "")
            yield f"there is no setting {written}; {_suggestion(meant, readable.values())}"


def _fault_in_name(name: str) -> str:
    fault = _of_others("an option", name)
    if fault or name in options.NAMES or not name.lower().startswith(_PREFIXES):
        return fault
    own = "An attribute of your own needs a name that does not begin with lock_"
    return f"there is no option {name}; {_suggestion(_meant(name), options.NAMES)} {own}"


def _of_others(kind: str, name: str, tables: Mapping[str, Mapping[str, str]] = _OF_OTHERS) -> str:
    for library, counterparts in tables.items():
        if name in counterparts:
            here = counterparts[name]
            return f"{name} is {kind} of {library}; here it is {here}: see {DOCS}how-to/migrate/#from-{library}"
    return ""


def _meant(name: str) -> str:
    option = name.lower().removeprefix("singleton_")
    return _MEANT.get(option) or _nearest(option, options.NAMES)


def _nearest(name: str, names: Iterable[str]) -> str:
    return next(iter(get_close_matches(name, sorted(names), n=1, cutoff=0.5)), "")


def _suggestion(meant: str, names: Iterable[str]) -> str:
    return f"did you mean {meant}?" if meant else f"there are {', '.join(sorted(names))}."
