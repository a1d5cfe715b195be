"""Options of a task and settings of an app: read, checked, and turned into plain values."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, TypedDict, get_args

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.leases.deadman import why_unavailable
from celery_singleton_lock.leases.key import KeyChoice, checked_label

DEFAULT_PREFIX = "singleton"
DEFAULT_VISIBILITY_TIMEOUT = 3600.0


class _Unset(Enum):
    UNSET = "unset"


UNSET = _Unset.UNSET
# One script looks at all places as it takes one.
MAX_LIMIT = 1000
# The scripts count microseconds since 1970, and Lua's numbers end before those of year 2255.
_CENTURY = 100 * 365 * 24 * 3600.0

Mode = Literal["while_executing", "until_executing", "until_executed", "until_and_while_executing"]
OnConflict = Literal["skip", "raise", "reschedule", "wait", "join", "rerun", "replace"]
_NOT_IN_QUEUE_MODES = ("join", "rerun", "replace")
OnLost = Literal["abort", "warn", "kill"]
OnStoreError = Literal["reschedule", "raise", "run", "skip"]
Duration = float | timedelta


class SingletonOptions(TypedDict, total=False):
    """The options of a `SingletonTask` for type checkers: `@app.task(base=SingletonTask, **SingletonOptions(...))`."""

    lock_mode: Mode | None
    lock_key: KeyChoice
    lock_name: str | None
    lock_limit: int | None
    lock_ttl: Duration | None
    lock_on_conflict: OnConflict | None
    lock_skip_result: Any
    lock_wait_timeout: Duration | None
    lock_on_lost: OnLost | None
    lock_on_store_error: OnStoreError | None
    lock_min_hold: Duration | None
    lock_queue_ttl: Duration | None
    lock_label: str | None


def seconds(name: str, value: Any, *, least: float) -> float:
    """*value*, a number of seconds or a timedelta, as a float of at least *least*, and less than a century."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number < _CENTURY:
        raise ConfigurationError(
            f"{name}={value!r} is not allowed: give a number of seconds, at least {least:g} and less than a "
            "century, or a timedelta"
        )
    return float(number)


def count(name: str, value: Any) -> int:
    """*value*, if it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LIMIT:
        raise ConfigurationError(f"{name}={value!r} is not allowed: give a whole number from 1 to {MAX_LIMIT}")
    return value


def one_of(name: str, value: Any, words: Any) -> Any:
    """*value*, if it is one of the *words*, a `Literal`."""
    allowed = get_args(words)
    if not isinstance(value, str) or value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not allowed; choose {_or(allowed)}")
    return value


def on_lost(name: str, value: Any) -> Any:
    """*value*, if this machine can do it."""
    why = why_unavailable() if value == "kill" else None
    if why is not None:
        raise ConfigurationError(f"{name}='kill' is not possible here: {why}; use 'abort'")
    return one_of(name, value, OnLost)


@dataclass(frozen=True, slots=True)
class Option:
    """How one `lock_*` option is checked, and its default."""

    default: Any
    check: Callable[[str, Any], Any]
    app_wide: bool = True


OPTIONS: Mapping[str, Option] = {
    "mode": Option("while_executing", lambda n, v: one_of(n, v, Mode), app_wide=False),
    "limit": Option(1, count, app_wide=False),
    "ttl": Option(30, lambda n, v: seconds(n, v, least=1)),
    "on_conflict": Option("skip", lambda n, v: one_of(n, v, OnConflict)),
    "wait_timeout": Option(None, lambda n, v: None if v is None else seconds(n, v, least=0)),
    "on_lost": Option("abort", on_lost),
    "on_store_error": Option("reschedule", lambda n, v: one_of(n, v, OnStoreError)),
    "min_hold": Option(0, lambda n, v: seconds(n, v, least=0)),
    "queue_ttl": Option(3600, lambda n, v: seconds(n, v, least=1)),
    "label": Option(None, checked_label, app_wide=False),
}


@dataclass(frozen=True, slots=True)
class LockOptions:
    """The options of one task, checked, and the app's settings that each of its runs needs. Durations are seconds.

    Attributes:
        holder_name: The name of the task, if its lock has another name.
    """

    mode: Mode
    limit: int
    ttl: float
    on_conflict: OnConflict
    wait_timeout: float | None
    on_lost: OnLost
    on_store_error: OnStoreError
    min_hold: float
    queue_ttl: float
    prefix: str
    visibility_timeout: float = DEFAULT_VISIBILITY_TIMEOUT
    skip_result: Any = UNSET
    label: str | None = None
    holder_name: str = ""

    @property
    def unique_in_queue(self) -> bool:
        """Calls of the task are told apart when they are published."""
        return self.mode != "while_executing"

    @property
    def skips_with_result(self) -> bool:
        """A skipped run returns `lock_skip_result`."""
        return self.skip_result is not UNSET


def check_values(task: Any) -> None:
    """Check what a task sets itself, or a class of tasks.

    Raises:
        ConfigurationError: Naming the task, the option, the value and what is allowed.
    """
    for name in OPTIONS:
        check_value(task, name)
    check_pair(task, task.lock_mode, task.lock_on_conflict)


def check_pair(task: Any, mode: Any, on_conflict: Any) -> None:
    """Refuse a policy that means nothing where an equal call is not even sent.

    Raises:
        ConfigurationError: Naming the task, both values and what to use instead.
    """
    if mode not in (None, "while_executing") and on_conflict in _NOT_IN_QUEUE_MODES:
        name = "singleton_lock_on_conflict" if task.lock_on_conflict is None else "lock_on_conflict"
        raise ConfigurationError(
            f"task {task.name}: {name}={on_conflict!r} does not go with lock_mode={mode!r}, in which an equal call is "
            "not sent and gets the result of the one that is queued; use 'skip', 'raise', 'reschedule' or 'wait', or "
            "lock_mode='while_executing'"
        )


def check_value(task: Any, name: str) -> None:
    """Check one of them.

    Raises:
        ConfigurationError: Naming the task, the option, the value and what is allowed.
    """
    value = getattr(task, f"lock_{name}")
    try:
        if value is not None:
            OPTIONS[name].check(f"lock_{name}", value)
    except ConfigurationError as error:
        raise ConfigurationError(f"task {task.name}: {error}") from None


def resolve(app: Celery, task: Any) -> LockOptions:
    """The task's own values, else the app's settings, else the defaults.

    Raises:
        ConfigurationError: A `singleton_lock_*` setting has a value that is not allowed.
    """
    resolved = {name: _resolve_one(app, name, getattr(task, f"lock_{name}")) for name in OPTIONS}
    check_pair(task, resolved["mode"], resolved["on_conflict"])
    timeout = _visibility_timeout(app)
    return LockOptions(
        **resolved,
        prefix=prefix_of(app),
        visibility_timeout=timeout,
        skip_result=task.lock_skip_result,
        holder_name="" if task.lock_name is None else task.name,
    )


def _visibility_timeout(app: Celery) -> float:
    """The broker's, as a number or the text of one."""
    value = (app.conf.broker_transport_options or {}).get("visibility_timeout", DEFAULT_VISIBILITY_TIMEOUT)
    with suppress(TypeError, ValueError):
        if 0 <= (timeout := float(value)) < float("inf"):
            # Some give a huge number for never.
            return min(timeout, _CENTURY)
    raise ConfigurationError(
        f"broker_transport_options: visibility_timeout={value!r} is not allowed: give a number of seconds, at least 0, "
        f"such as {DEFAULT_VISIBILITY_TIMEOUT:g}"
    )


def check_setting(app: Celery, name: str) -> None:
    """Return if the app's setting of an option can be used.

    Raises:
        ConfigurationError: It has a value that is not allowed.
    """
    _resolve_one(app, name, None)


def _resolve_one(app: Celery, name: str, own: Any) -> Any:
    option = OPTIONS[name]
    if own is not None:
        return option.check(f"lock_{name}", own)
    label = f"singleton_lock_{name}"
    # Not app.add_defaults(): that would override what the user configures.
    return option.check(label, app.conf.get(label, option.default) if option.app_wide else option.default)


def prefix_of(app: Celery) -> str:
    """The prefix of all keys of the app."""
    prefix = app.conf.get("singleton_lock_prefix", UNSET)
    if prefix is UNSET:
        return _keyprefix_of(app) + DEFAULT_PREFIX
    if not isinstance(prefix, str) or not prefix or "{" in prefix or "}" in prefix:
        raise ConfigurationError(
            f"singleton_lock_prefix={prefix!r} is not allowed: give a text without braces, such as {DEFAULT_PREFIX!r}"
        )
    return prefix


def _keyprefix_of(app: Celery) -> str:
    """The part that distinguishes this deployment from others that Celery has in the same Redis."""
    for options in (app.conf.result_backend_transport_options, app.conf.broker_transport_options):
        prefix = (options or {}).get("global_keyprefix")
        if prefix:
            # Braces are a hash tag for a cluster, and ours come later in the key.
            return str(prefix).replace("{", "").replace("}", "")
    return ""


def _or(words: tuple[str, ...]) -> str:
    return " or ".join([", ".join(map(repr, words[:-1])), repr(words[-1])] if len(words) > 1 else [repr(words[0])])
