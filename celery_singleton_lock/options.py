"""The options of a task and the settings of an app: default, check, and what a misspelt name was meant to be."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from celery import Celery

from celery_singleton_lock.errors import DOCS, ConfigurationError
from celery_singleton_lock.leases.deadman import why_unavailable

_DEFAULT_PREFIX = "singleton"
_VISIBILITY_TIMEOUT = 3600.0


class _Unset(Enum):
    UNSET = "unset"


UNSET = _Unset.UNSET
# One script looks at all places as it takes one.
MAX_LIMIT = 1000
# The scripts count microseconds since 1970, and Lua's numbers end before those of year 2255.
_CENTURY = 100 * 365 * 24 * 3600.0

Mode = Literal["while_executing", "until_executing", "until_executed", "until_and_while_executing"]
OnConflict = Literal["skip", "raise", "reschedule", "wait", "join", "rerun", "replace"]
OnLost = Literal["abort", "warn", "kill"]
OnStoreError = Literal["reschedule", "raise", "run", "skip"]
KeyChoice = str | Sequence[str] | Callable[..., Any] | None
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


def given(value: Any) -> str:
    """*value* for a message; with its type if it is no text, and looks like one."""
    text = ""
    # Such as that of a translation before Django is set up.
    with suppress(Exception):
        text = f"{value!r:.80}"
    is_plain = isinstance(value, str) or (text and text[0] not in "'\"")
    return text if is_plain else f"<a {type(value).__qualname__} {text}>"


def one_of(name: str, value: Any, words: Any) -> Any:
    """*value*, if it is one of the *words*, a `Literal`."""
    *others, last = map(repr, get_args(words))
    if not isinstance(value, str) or value not in get_args(words):
        raise ConfigurationError(f"{name}={given(value)} is not allowed; choose {', '.join(others)} or {last}")
    return value


def on_lost(name: str, value: Any) -> Any:
    """*value*, if this machine can do it."""
    why = why_unavailable() if value == "kill" else None
    if why is not None:
        raise ConfigurationError(f"{name}='kill' is not possible here: {why}; use 'abort'")
    return one_of(name, value, OnLost)


def label(name: str, value: Any) -> str | None:
    """*value*, if it can be a format string."""
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(
            f"{name}={given(value)} is not allowed: give a format string, of type str, with at least one {{parameter}}"
        )
    return value


class Lockable:
    """Marks the base class of the tasks that this library locks: `isinstance` finds it through any proxy of a task."""

    name: str

    @classmethod
    def is_lockable(cls) -> bool:
        """Celery's own tasks are never locked, not even with `app.Task = SingletonTask`."""
        return not cls.name.startswith("celery.")


def base_in(cls: type[Any]) -> type[Any]:
    """Our base class among those of a class of tasks, whose other bases we do not own."""
    return next(each for each in cls.__mro__ if Lockable in each.__bases__)


def setting(app: Celery, name: str, default: Any = None) -> Any:
    """What was assigned, else configured. In a namespace, Celery before 5.7 prefers what was configured."""
    # First, for this reads the configuration.
    configured = app.conf.get(name, default)
    return app.conf.changes.get(name, configured)


class Option(NamedTuple):
    """How one `lock_*` option is checked, and its default."""

    default: Any
    check: Callable[[str, Any], Any]
    app_wide: bool = True


OPTIONS: Mapping[str, Option] = {
    "mode": Option("while_executing", partial(one_of, words=Mode), app_wide=False),
    "limit": Option(1, count, app_wide=False),
    "ttl": Option(30, partial(seconds, least=1)),
    "on_conflict": Option("skip", partial(one_of, words=OnConflict)),
    "wait_timeout": Option(None, lambda n, v: None if v is None else seconds(n, v, least=0)),
    "on_lost": Option("abort", on_lost),
    "on_store_error": Option("reschedule", partial(one_of, words=OnStoreError)),
    "min_hold": Option(0, partial(seconds, least=0)),
    "queue_ttl": Option(3600, partial(seconds, least=1)),
    "label": Option(None, label, app_wide=False),
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
    label: str | None
    visibility_timeout: float
    skip_result: Any
    holder_name: str

    @property
    def unique_in_queue(self) -> bool:
        """Equal calls of the task are found when they are published."""
        return self.mode != "while_executing"

    @property
    def skips_with_result(self) -> bool:
        """A skipped run returns `lock_skip_result`."""
        return self.skip_result is not UNSET


def option_of(task: Any, name: str, default: Any = None) -> Any:
    """What a task, or a class of tasks, has for `lock_<name>`; a function there is no method."""
    name = f"lock_{name}"
    if isinstance(task, type):
        return getattr(task, name, default)
    return vars(task).get(name, getattr(type(task), name, default))


def refuse(faults: Iterable[str]) -> None:
    """Raise a `ConfigurationError` with each of the *faults* once, in a line of its own, if there are any."""
    if lines := list(dict.fromkeys(faults)):
        raise ConfigurationError("\n".join(lines))


def values_of(task: Any, app: Celery | None = None) -> tuple[dict[str, Any], list[str]]:
    """The task's own values, else the app's settings, else the defaults, all checked; and what is not allowed.

    Without an app, only what the task, or a class of tasks, sets itself.
    """
    values, faults = dict[str, Any](), list[str]()
    for name, option in OPTIONS.items():
        own = option_of(task, name)
        try:
            if own is not None:
                values[name] = option.check(f"lock_{name}", own)
            elif app is not None:
                name_for_all = f"singleton_lock_{name}"
                # Not app.add_defaults(): that would override what the user configures.
                set_for_all = setting(app, name_for_all, option.default) if option.app_wide else option.default
                values[name] = option.check(name_for_all, set_for_all)
        except ConfigurationError as error:
            faults.append(str(error) if own is None else f"task {task.name}: {error}")
    mode, on_conflict = values.get("mode", "while_executing"), values.get("on_conflict")
    if mode != "while_executing" and on_conflict in ("join", "rerun", "replace"):
        where = "singleton_lock_on_conflict" if option_of(task, "on_conflict") is None else "lock_on_conflict"
        faults.append(
            f"task {task.name}: {where}={on_conflict!r} does not go with lock_mode={mode!r}, in which an equal call is "
            "not sent and gets the result of the one that is queued; use 'skip', 'raise', 'reschedule' or 'wait', or "
            "lock_mode='while_executing'"
        )
    return values, faults


def visibility_timeout_of(app: Celery) -> float:
    """The broker's, as a number or the text of one."""
    value = (app.conf.broker_transport_options or {}).get("visibility_timeout", _VISIBILITY_TIMEOUT)
    try:
        timeout = float(value)
    except (TypeError, ValueError):
        timeout = -1.0
    if not 0 <= timeout < float("inf"):
        raise ConfigurationError(
            f"broker_transport_options: visibility_timeout={value!r} is not allowed: give a number of seconds, at "
            f"least 0, such as {_VISIBILITY_TIMEOUT:g}"
        )
    # Some give a huge number for never.
    return min(timeout, _CENTURY)


def prefix_of(app: Celery) -> str:
    """The prefix of all keys of the app; by default with the one that separates deployments in the same Redis."""
    prefix = setting(app, "singleton_lock_prefix", UNSET)
    if prefix is UNSET:
        transports = app.conf.result_backend_transport_options, app.conf.broker_transport_options
        shared = next(filter(None, ((options or {}).get("global_keyprefix") for options in transports)), "")
        # Braces are a hash tag for a cluster, and ours come later in the key.
        return str(shared).replace("{", "").replace("}", "") + _DEFAULT_PREFIX
    if not isinstance(prefix, str) or not prefix or "{" in prefix or "}" in prefix:
        raise ConfigurationError(
            f"singleton_lock_prefix={prefix!r} is not allowed: give a text without braces, such as {_DEFAULT_PREFIX!r}"
        )
    return prefix


def logs_labels(app: Celery) -> bool:
    """The labels of calls stand in the log as well."""
    value = app.conf.get("singleton_lock_log_labels", False)
    if not isinstance(value, bool):
        raise ConfigurationError(f"singleton_lock_log_labels={value!r} is not allowed: give True or False")
    return value


# Names.

NAMES = frozenset(SingletonOptions.__annotations__)
SETTINGS = (
    "singleton_lock_url",
    "singleton_lock_prefix",
    "singleton_lock_client_options",
    "singleton_lock_replicas",
    "singleton_lock_log_labels",
    "singleton_beat_ttl",
    "singleton_beat_name",
    *(f"singleton_lock_{name}" for name, option in OPTIONS.items() if option.app_wide),
)
# So much alike are `loc_key`, `lockttl` and `look_key`, and the options that were meant.
_A_LETTER_OFF = 0.86
# Options and settings of the libraries that people come from, each with its library and its counterpart here.
_OF_OTHERS: Mapping[str, tuple[str, str]] = {
    "unique_on": ("celery-singleton", "lock_key"),
    "raise_on_duplicate": ("celery-singleton", 'lock_on_conflict="raise"'),
    "lock_expiry": ("celery-singleton", "lock_queue_ttl"),
    "once": ("celery-once", "lock_key, lock_mode and others"),
    "heimdall": ("celery-heimdall", "lock_mode and others"),
    "singleton_backend_url": ("celery-singleton", "singleton_lock_url"),
    "singleton_backend_class": ("celery-singleton", "singleton_lock_url"),
    "singleton_backend_kwargs": ("celery-singleton", "singleton_lock_client_options"),
    "singleton_key_prefix": ("celery-singleton", "singleton_lock_prefix"),
    "singleton_lock_expiry": ("celery-singleton", "singleton_lock_queue_ttl"),
    "singleton_raise_on_duplicate": ("celery-singleton", "singleton_lock_on_conflict"),
}
# What people write for an option, but for `name`, which is Celery's.
_WORDS: Mapping[str, str] = {
    **{name.removeprefix("lock_"): name for name in NAMES if name != "lock_name"},
    "policy": "lock_on_conflict",
    "timeout": "lock_wait_timeout",
    "unique_key": "lock_key",
}
_PREFIXES = ("lock_", "singleton_lock_")


def faults_in_names(cls: type[Any]) -> Iterator[str]:
    """What the classes of a task call as no option is called.

    A method or a property is the user's own, and so is any name that a class behind has as well. Words such as `ttl`
    count only as arguments of the decorator and in `task_annotations`; a class may mean something else by them.
    """
    ours = base_in(cls).__mro__
    for number, each in enumerate(cls.__mro__):
        if each in ours:
            continue
        is_decorated = "_decorated" in vars(each)
        for name, value in vars(each).items():
            is_own = hasattr(type(value), "__get__") and not is_decorated
            is_behind = any(name in vars(behind) for behind in cls.__mro__[number + 1 :])
            if name in NAMES or is_own or is_behind:
                continue
            if fault := _fault_in_name(name, with_words=is_decorated):
                yield f"task {cls.name}: {fault}"


def check_name(task: Any, name: str) -> None:
    """Refuse an option that does not exist, as it is set on the object."""
    if name in NAMES or hasattr(type(task), name):
        return
    if fault := _fault_in_name(name):
        raise ConfigurationError(f"task {task.name}: {fault}")


def check_call_options(task: str, options: Mapping[str, Any]) -> None:
    """Refuse an option of the task that is given with a call."""
    for name in options:
        # A word such as `ttl` may be an argument of the broker, or of a router.
        is_option = name.startswith(_PREFIXES) or name in _OF_OTHERS
        if not is_option or name in (options.get("stamped_headers") or ()):
            continue
        if name in _OF_OTHERS:
            raise ConfigurationError(f"task {task}: {_fault_in_name(name)}")
        raise ConfigurationError(
            f"task {task}: {name} cannot be given with a call, because options belong to the task; write "
            f"`@app.task(base=SingletonTask, {_meant(name) or 'lock_...'}=...)`"
        )


def _fault_in_name(name: str, *, with_words: bool = False) -> str:
    if name in _OF_OTHERS:
        return _of_others(name, "an option")
    is_prefixed = name.lower().startswith(_PREFIXES)
    is_near = not name.startswith("_") and _nearest(name, NAMES, _A_LETTER_OFF)
    is_word = with_words and (name.removeprefix("singleton_") in _WORDS or is_near)
    if not (is_prefixed or is_word):
        return ""
    own = " An attribute of your own needs a name that does not begin with lock_" if is_prefixed else ""
    return f"there is no option {name}; {_suggestion(_meant(name), NAMES)}{own}"


def _meant(name: str) -> str:
    word = name.lower().removeprefix("singleton_").removeprefix("lock_")
    return _WORDS.get(word) or _nearest(f"lock_{word}", NAMES)


def _suggestion(meant: str, names: Iterable[str]) -> str:
    return f"did you mean {meant}?" if meant else f"there are {', '.join(sorted(names))}."


def _nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    return next(iter(get_close_matches(name, sorted(names), n=1, cutoff=cutoff)), "")


def as_set(app: Celery, text: str) -> str:
    """*text* with the settings of this library as the app's configuration spells them."""
    if not app.namespace:
        return text
    of_app = re.compile(rf"(?<![\w'])(?:app\.conf\.)?({'|'.join(sorted(SETTINGS, key=len, reverse=True))})\b")
    return of_app.sub(lambda found: _as_celery_reads(app, found[1]), text)


def _as_celery_reads(app: Celery, name: str) -> str:
    namespace = f"{app.namespace.rstrip('_')}_" if app.namespace else ""
    return (namespace + name).upper() if namespace.isupper() else (namespace + name).lower()


def faults_in_settings(app: Celery) -> Iterator[str]:
    """The settings that do not exist, or stand where Celery does not look for them."""
    namespace, as_celery_reads = _as_celery_reads(app, ""), partial(_as_celery_reads, app)
    readable = {name: as_celery_reads(name) for name in SETTINGS}
    # Only the names, because a source may make its values when they are read.
    for written in map(str, app.conf):
        name = written.lower().removeprefix(namespace.lower() or "celery_")
        is_read = written in (name, as_celery_reads(name))
        # A source may serve others as well, such as Django's settings.
        is_ours = name.startswith("singleton_" if is_read else ("singleton_lock_", "singleton_beat_"))
        if not (is_ours or _nearest(name, SETTINGS, _A_LETTER_OFF)):
            continue
        option = name.removeprefix("singleton_")
        if name in readable:
            if not is_read:
                yield f"the setting {written} is not read; write {readable[name]}"
        elif name in _OF_OTHERS:
            # If that library is there, it serves other tasks of the app.
            if "celery_singleton" not in sys.modules:
                yield _of_others(name, "a setting")
        elif option in NAMES:
            yield f"there is no setting {written}: {option} is an option of each task alone"
        else:
            meant = readable.get(_nearest(name, SETTINGS), "")
            yield f"there is no setting {written}; {_suggestion(meant, readable.values())}"


def _of_others(name: str, kind: str) -> str:
    library, counterpart = _OF_OTHERS[name]
    return f"{name} is {kind} of {library}; here it is {counterpart}: see {DOCS}migrate/#from-{library}"
