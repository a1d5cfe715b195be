"""The options of a task and the settings of an app: defaults and checks."""

import ctypes
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypedDict, get_args, get_type_hints
from weakref import WeakKeyDictionary

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.stores.clock import clock

try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:
    # Celery 5.4 has none.
    detect_quorum_queues = None

_DEFAULT_PREFIX = "singleton"
_VISIBILITY_TIMEOUT = 3600.0
# Attributes of kombu's channels, and the transport options that set them.
_TIMEOUTS = {
    "visibility_timeout": "visibility_timeout",
    "default_visibility_timeout": "visibility_timeout",
    "default_peek_lock_seconds": "peek_lock_seconds",
}

# Seconds by which a redelivery may come after the visibility timeout: kombu looks for it about every 100 s.
SWEEP = 120.0
_delaying: WeakKeyDictionary["Celery[Any]", bool] = WeakKeyDictionary()

UNSET: Any = object()
# More places would slow every request for the lock: acquire.lua reads all of them.
MAX_LIMIT = 1000
# Lua's numbers hold the scripts' microseconds exactly until the year 2255.
_CENTURY = 100 * 365 * 24 * 3600.0
_LONGEST_BINDING_S = 10.0

Mode = Literal["while_executing", "until_executing", "until_executed", "until_and_while_executing"]
OnConflict = Literal["skip", "raise", "reschedule", "wait", "join", "rerun", "replace"]
OnLost = Literal["abort", "warn", "kill"]
OnStoreError = Literal["reschedule", "raise", "run", "skip"]
KeyChoice = str | Sequence[str] | Callable[..., Any] | None
Duration = float | timedelta


def not_allowed(name: str, value: Any, advice: str) -> ConfigurationError:
    """If *value* is no str but its repr looks like one, the text shows its type."""
    text = ""
    # The repr of a lazy translation raises before Django is set up.
    with suppress(Exception):
        text = f"{value!r:.80}"
    is_plain = isinstance(value, str) or (text and text[0] not in "'\"")
    shown = text if is_plain else f"<a {type(value).__qualname__} {text}>"
    return ConfigurationError(f"{name}={shown} is not allowed: {advice}")


def seconds(name: str, value: Any, *, least: float) -> float:
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number < _CENTURY:
        advice = f"give a number of seconds, at least {least:g} and less than a century, or a timedelta"
        raise not_allowed(name, value, advice)
    return float(number)


def count(name: str, value: Any, *, least: int = 1, most: int = MAX_LIMIT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise not_allowed(name, value, f"give a whole number from {least} to {most}")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise not_allowed(name, value, "give True or False")
    return value


def one_of(name: str, value: Any, words: Any) -> Any:
    *others, last = map(repr, get_args(words))
    if not isinstance(value, str) or value not in get_args(words):
        raise not_allowed(name, value, f"choose {', '.join(others)} or {last}")
    return value


def on_lost(name: str, value: Any) -> Any:
    if value == "kill" and not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "timer_create")):
        why = f"it needs a timer of the Linux kernel, and a C library with timer_create; this is {sys.platform}"
        raise ConfigurationError(f"{name}='kill' is not possible here: {why}; use 'abort'")
    return one_of(name, value, OnLost)


def label(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise not_allowed(name, value, "give a format string, of type str, with at least one {parameter}")
    return value


class Lockable:
    name: str
    is_lockable: ClassVar[bool] = True
    """False for Celery's own tasks, even with `app.Task = SingletonTask`, and for all tasks in `testing.disabled`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if str(getattr(cls, "name", None)).startswith("celery."):
            cls.is_lockable = False


def lockable(app: Celery) -> list[Any]:
    ours = [task for task in app.tasks.values() if isinstance(task, Lockable) and task.is_lockable]
    return sorted(ours, key=lambda task: task.name)


def base_in(cls: type[Any]) -> type[Any]:
    """`SingletonTask`. An import of it would be circular."""
    return next(each for each in cls.__mro__ if Lockable in each.__bases__)


def setting(app: Celery, name: str, default: Any = None) -> Any:
    """Prefers the assigned value. Celery before 5.7 prefers the configured one if there is a namespace."""
    # Read this first: loading the configuration may add to `changes`.
    configured = app.conf.get(name, default)
    return app.conf.changes.get(name, configured)


class Option(NamedTuple):
    """With *app_wide*, a setting of the app can replace the default."""

    default: Any
    check: Callable[[str, Any], Any]
    app_wide: bool = True


class SingletonOptions(TypedDict, total=False):
    """The options of a `SingletonTask` for type checkers: `@app.task(base=SingletonTask, **SingletonOptions(...))`."""

    lock_mode: Annotated[Mode | None, Option("while_executing", partial(one_of, words=Mode), app_wide=False)]
    lock_key: KeyChoice
    lock_name: str | None
    lock_limit: Annotated[int | None, Option(1, count, app_wide=False)]
    lock_ttl: Annotated[Duration | None, Option(30, partial(seconds, least=1))]
    lock_on_conflict: Annotated[OnConflict | None, Option("skip", partial(one_of, words=OnConflict))]
    lock_skip_result: Any
    lock_wait_timeout: Annotated[Duration | None, Option(None, partial(seconds, least=0))]
    lock_on_lost: Annotated[OnLost | None, Option("abort", on_lost)]
    lock_on_store_error: Annotated[OnStoreError | None, Option("reschedule", partial(one_of, words=OnStoreError))]
    lock_min_hold: Annotated[Duration | None, Option(0, partial(seconds, least=0))]
    lock_min_hold_on_failure: Annotated[bool | None, Option(True, flag)]
    lock_queue_ttl: Annotated[Duration | None, Option(3600, partial(seconds, least=1))]
    lock_label: Annotated[str | None, Option(None, label, app_wide=False)]


NAMES: Mapping[str, Any] = get_type_hints(SingletonOptions, include_extras=True)
OPTIONS: Mapping[str, Option] = {
    name.removeprefix("lock_"): hint.__metadata__[0] for name, hint in NAMES.items() if hasattr(hint, "__metadata__")
}
SETTINGS = (
    "singleton_lock_url",
    "singleton_lock_prefix",
    "singleton_lock_client_options",
    "singleton_lock_replicas",
    "singleton_lock_log_labels",
    "singleton_lock_history",
    "singleton_beat_ttl",
    "singleton_beat_name",
    *(f"singleton_lock_{name}" for name, option in OPTIONS.items() if option.app_wide),
)

_NOT_SENT = (
    "in which an equal call is not sent and gets the result of the queued call; use 'skip', 'raise', "
    "'reschedule' or 'wait', or "
)
_NO_SUCCESSOR = _NOT_SENT + "lock_mode='until_and_while_executing', in which the newest call runs next"
_REFUSED_PAIRS = {
    **{(mode, "join"): _NOT_SENT + "lock_mode='while_executing'" for mode in get_args(Mode)[1:]},
    **{("until_executed", policy): _NO_SUCCESSOR for policy in ("rerun", "replace")},
    ("until_executing", "replace"): "in which a run has no lock and so cannot be asked to stop; use 'rerun', or "
    "lock_mode='until_and_while_executing'",
}


@dataclass(frozen=True, slots=True)
class LockOptions:
    """The checked options of one task, with the settings that it needs. Durations are in seconds.

    Attributes:
        holder_name: The name of the task if its lock has another name, else empty.
        redelivered_within: Seconds for which the broker may deliver a message again.
    """

    mode: Mode
    limit: int
    ttl: float
    on_conflict: OnConflict
    wait_timeout: float | None
    on_lost: OnLost
    on_store_error: OnStoreError
    min_hold: float
    min_hold_on_failure: bool
    queue_ttl: float
    prefix: str
    label: str | None
    visibility_timeout: float
    skip_result: Any
    holder_name: str
    unique_in_queue: bool
    newest_wins: bool
    kills: bool
    redelivered_within: float

    @property
    def skips_with_result(self) -> bool:
        return self.skip_result is not UNSET


def no_process_for(task_name: str) -> ConfigurationError:
    return ConfigurationError(
        f"task {task_name}: lock_on_lost='kill' needs a process to kill, which only the prefork pool has; "
        "run the worker with --pool prefork, or use 'abort'"
    )


def wait_until_bound(task: Any) -> None:
    """Celery registers a task before binding it, so another thread can already call it."""
    # Reading `task.app` binds the task, unless the user's class has its own `app`.
    if not task.__bound__:
        task.bind(task.app)
    give_up_at = clock() + _LONGEST_BINDING_S
    # `bind` sets `request_stack` last.
    while task.request_stack is None and clock() < give_up_at:
        time.sleep(0.001)


def option_of(task: Any, name: str, default: Any = None) -> Any:
    """The option as it was given. Reading `task.lock_key` would bind a function to the task, as a method."""
    name = f"lock_{name}"
    return vars(task).get(name, getattr(type(task), name, default))


def refuse(faults: Iterable[str]) -> None:
    if lines := list(dict.fromkeys(faults)):
        raise ConfigurationError("\n".join(lines))


def values_of(task: Any, app: Celery | None = None) -> tuple[dict[str, Any], list[str]]:
    """Values and faults. Without *app*, only of what the task itself sets."""
    values = dict[str, Any]()
    faults = list[str]()
    for name, option in OPTIONS.items():
        own = value = option_of(task, name)
        spelled = f"lock_{name}"
        if own is None:
            if app is None:
                continue
            spelled = f"singleton_lock_{name}"
            value = setting(app, spelled, option.default) if option.app_wide else option.default
        try:
            values[name] = None if value is option.default is None else option.check(spelled, value)
        except ConfigurationError as error:
            faults.append(str(error) if own is None else f"task {task.name}: {error}")
    mode = values.get("mode", "while_executing")
    on_conflict = values.get("on_conflict")
    if refused := _REFUSED_PAIRS.get((mode, str(on_conflict))):
        where = "singleton_lock_on_conflict" if option_of(task, "on_conflict") is None else "lock_on_conflict"
        faults.append(f"task {task.name}: {where}={on_conflict!r} does not go with lock_mode={mode!r}, {refused}")
    return values, faults


def visibility_timeout_of(app: Celery) -> float:
    options = app.conf.broker_transport_options or {}
    value = options.get("visibility_timeout", _VISIBILITY_TIMEOUT)
    if "visibility_timeout" not in options:
        # A transport may need a package that is not installed here.
        with suppress(Exception):
            channel = app.connection_for_read().get_transport_cls().Channel
            name = next(each for each in _TIMEOUTS if isinstance(getattr(channel, each, None), int | float))
            value = options.get(_TIMEOUTS[name], getattr(channel, name))
    # SQS accepts the timeout as a str.
    with suppress(TypeError, ValueError):
        value = float(value)
    return seconds("broker_transport_options: visibility_timeout", value, least=0)


def broker_delays(app: Celery) -> bool:
    """Whether RabbitMQ keeps messages until their ETA, so that no worker can run one earlier."""
    if app not in _delaying:
        driver = app.producer_pool.connections.connection.transport.driver_type
        _delaying[app] = detect_quorum_queues is not None and bool(detect_quorum_queues(app, driver)[0])
    return _delaying[app]


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode *text*. On a channel with other text, the listener would fail, and wake no waiter."""
    return text == text.encode(errors="replace").decode()


def prefix_of(app: Celery) -> str:
    prefix = setting(app, "singleton_lock_prefix", UNSET)
    if prefix is UNSET:
        transports = app.conf.result_backend_transport_options, app.conf.broker_transport_options
        shared = next(filter(None, ((options or {}).get("global_keyprefix") for options in transports)), "")
        # In a cluster, braces in the prefix would become the hash tag.
        return str(shared).replace("{", "").replace("}", "") + _DEFAULT_PREFIX
    if not isinstance(prefix, str) or not is_unicode(prefix) or not prefix or "{" in prefix or "}" in prefix:
        advice = f"give a text without braces that UTF-8 can encode, such as {_DEFAULT_PREFIX!r}"
        raise not_allowed("singleton_lock_prefix", prefix, advice)
    return prefix


def beat_ttl_of(app: Celery) -> float:
    name = "singleton_lock_ttl" if setting(app, "singleton_beat_ttl") is None else "singleton_beat_ttl"
    return seconds(name, setting(app, name, 30), least=1)


def logs_labels(app: Celery) -> bool:
    return flag("singleton_lock_log_labels", setting(app, "singleton_lock_log_labels", False))


def as_set(app: Celery, text: str) -> str:
    """Spell the settings in *text* as the app's configuration does."""
    if not app.namespace:
        return text
    of_app = re.compile(rf"(?<![\w'])(?:app\.conf\.)?({'|'.join(SETTINGS)})\b")
    return of_app.sub(lambda found: as_celery_reads(app, found[1]), text)


def as_celery_reads(app: Celery, name: str) -> str:
    namespace = f"{app.namespace.rstrip('_')}_" if app.namespace else ""
    return (namespace + name).upper() if namespace.isupper() else (namespace + name).lower()
