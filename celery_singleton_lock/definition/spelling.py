"""Names that are no option and no setting: refused, with the one that was meant or the counterpart here."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from celery import Celery

from celery_singleton_lock.definition.options import NAMES, SETTINGS, as_celery_reads, base_in
from celery_singleton_lock.errors import DOCS, ConfigurationError

_PREFIXES = ("lock_", "singleton_lock_")
# What other libraries of locks call an option, where another name here looks more like it.
_MEANT = {
    **dict.fromkeys(("lock_timeout", "lock_expire", "lock_expires", "lock_expiration"), "lock_ttl"),
    "lock_blocking_timeout": "lock_wait_timeout",
}
# Options and settings, and methods, of the libraries that people come from, each with its counterpart here.
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
    "celery-once-task": {
        "_acquire_lock": "taken before the body",
        "_release_lock": "released after the body",
    },
    "celery-heimdall": {"setup_redis": "singleton_lock_url"},
}


def faults_in_names(cls: type[Any]) -> Iterator[str]:
    """What the classes of a task call as no option is called.

    A method or a property is the user's own, unless it has done the work of another library; and so is any name that
    a class behind has as well. An option without its prefix, such as `ttl`, counts only as an argument of the decorator
    and in `task_annotations`.
    """
    ours = base_in(cls).__mro__
    for number, each in enumerate(cls.__mro__):
        if each in ours:
            continue
        is_decorated = "_decorated" in vars(each)
        for name, value in vars(each).items():
            if any(name in vars(behind) for behind in cls.__mro__[number + 1 :]):
                continue
            fault = _of_others("a method", name, _METHODS_OF_OTHERS)
            if is_decorated and f"lock_{name}" in NAMES:
                fault = f"there is no option {name}; did you mean lock_{name}?"
            elif is_decorated or not hasattr(type(value), "__get__"):
                fault = fault or _fault_in_name(name)
            if fault:
                yield f"task {cls.name}: {fault}"


def check_name(task: Any, name: str) -> None:
    """Refuse an option that does not exist, as it is set on the object."""
    if not hasattr(type(task), name) and (fault := _fault_in_name(name)):
        raise ConfigurationError(f"task {task.name}: {fault}")


def check_call_options(task: str, options: Mapping[str, Any]) -> None:
    """Refuse an option of the task that is given with a call."""
    for name in options:
        fault = _of_others("an option", name)
        if name.startswith(_PREFIXES) and not fault:
            fault = (
                f"{name} cannot be given with a call, because options belong to the task; write "
                f"`@app.task(base=SingletonTask, {_meant(name) or 'lock_...'}=...)`"
            )
        if fault and name not in (options.get("stamped_headers") or ()):
            raise ConfigurationError(f"task {task}: {fault}")


def faults_in_settings(app: Celery) -> Iterator[str]:
    """The settings that do not exist, or stand where Celery does not look for them."""
    namespace = as_celery_reads(app, "").lower()
    readable = {name: as_celery_reads(app, name) for name in SETTINGS}
    # Only the names, because a source may make its values when they are read.
    for written in map(str, app.conf):
        name = written.lower().removeprefix(namespace or "celery_")
        is_read = written in (name, as_celery_reads(app, name))
        # A source may serve others as well, such as Django's settings.
        if not name.startswith("singleton_" if is_read else ("singleton_lock_", "singleton_beat_")):
            continue
        option = name.removeprefix("singleton_")
        if name in readable:
            if not is_read:
                yield f"the setting {written} is not read; write {readable[name]}"
        elif fault := _of_others("a setting", name):
            # If that library is there, it serves other tasks of the app.
            if "celery_singleton" not in sys.modules:
                yield fault
        elif option in NAMES:
            yield f"there is no setting {written}: {option} is an option of each task alone"
        else:
            meant = readable.get(f"singleton_{_MEANT.get(option)}") or readable.get(_nearest(name, SETTINGS), "")
            yield f"there is no setting {written}; {_suggestion(meant, readable.values())}"


def _fault_in_name(name: str) -> str:
    fault = _of_others("an option", name)
    if fault or name in NAMES or not name.lower().startswith(_PREFIXES):
        return fault
    own = "An attribute of your own needs a name that does not begin with lock_"
    return f"there is no option {name}; {_suggestion(_meant(name), NAMES)} {own}"


def _of_others(kind: str, name: str, tables: Mapping[str, Mapping[str, str]] = _OF_OTHERS) -> str:
    """What *name*, of that kind, is in another library and here; empty if it is in none."""
    for library, counterparts in tables.items():
        if name in counterparts:
            here = counterparts[name]
            return f"{name} is {kind} of {library}; here it is {here}: see {DOCS}how-to/migrate/#from-{library}"
    return ""


def _meant(name: str) -> str:
    option = name.lower().removeprefix("singleton_")
    return _MEANT.get(option) or _nearest(option, NAMES)


def _nearest(name: str, names: Iterable[str]) -> str:
    return next(iter(get_close_matches(name, sorted(names), n=1, cutoff=0.5)), "")


def _suggestion(meant: str, names: Iterable[str]) -> str:
    return f"did you mean {meant}?" if meant else f"there are {', '.join(sorted(names))}."
