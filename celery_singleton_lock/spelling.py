"""Refusal of names that are no option and no setting, with the name that was probably meant."""

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from celery import Celery, Task

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.options import OPTIONS, SingletonOptions

if sys.version_info >= (3, 14):
    from annotationlib import Format, get_annotations

_OPTIONS = frozenset(SingletonOptions.__annotations__)
_SETTINGS = frozenset(
    {
        "singleton_lock_url",
        "singleton_lock_prefix",
        "singleton_lock_client_options",
        "singleton_lock_replicas",
        "singleton_beat_ttl",
        "singleton_beat_name",
        *(f"singleton_lock_{name}" for name, option in OPTIONS.items() if option.app_wide),
    }
)
# Names of the libraries that people come from, each with its library and its counterpart here.
FOREIGN_OPTIONS: Mapping[str, tuple[str, str]] = {
    "unique_on": ("celery-singleton", "lock_key"),
    "raise_on_duplicate": ("celery-singleton", 'lock_on_conflict="raise"'),
    "lock_expiry": ("celery-singleton", "lock_queue_ttl"),
    "once": ("celery-once", "lock_key, lock_mode and others"),
    "heimdall": ("celery-heimdall", "lock_mode and others"),
}
FOREIGN_SETTINGS: Mapping[str, tuple[str, str]] = {
    "singleton_backend_url": ("celery-singleton", "singleton_lock_url"),
    "singleton_backend_class": ("celery-singleton", "singleton_lock_url"),
    "singleton_backend_kwargs": ("celery-singleton", "singleton_lock_client_options"),
    "singleton_key_prefix": ("celery-singleton", "singleton_lock_prefix"),
    "singleton_lock_expiry": ("celery-singleton", "singleton_lock_queue_ttl"),
    "singleton_raise_on_duplicate": ("celery-singleton", "singleton_lock_on_conflict"),
}
# Other names for an option.
_SAID_FOR: Mapping[str, str] = {"unique_key": "lock_key"}
_PREFIX = "lock_"
_OF_CELERY = frozenset(dir(Task))
# From which likeness on, of 1, a name is a misspelt option: if it has an annotation, and if it begins in another way.
_NEARLY, _VERY_NEARLY = 0.8, 0.87
_ANYWHERE = ("singleton_lock_", "singleton_beat_")


def check_option_names(cls: type[Any], ours: type[Any]) -> None:
    """Refuse an option that does not exist.

    A name is a class's own, and no misspelt option, if a class that the user wrote declares it as a method or a
    property, or with an annotation and is not nearly an option. In a class that does not come from *ours*, only names
    that begin with `lock_` are looked at.

    Raises:
        ConfigurationError: Naming the task, the option, and the one that was probably meant.
    """
    theirs = [each for each in cls.__mro__ if each not in ours.__mro__]
    for each in theirs:
        for name in _annotated(each):
            _check_annotation(cls, name)
    known = _declared_in(cls, ours)
    strangers = {name for each in theirs if not issubclass(each, ours) for name in vars(each)}
    for name in (name for each in theirs for name in vars(each) if name not in known):
        _check_name(cls, name, is_ours=name not in strangers)


def check_option_name(cls: type[Any], ours: type[Any], name: str) -> None:
    """Refuse an option that does not exist, as it is set on the object.

    Raises:
        ConfigurationError: Naming the task, the option, and the one that was probably meant.
    """
    is_new = not any(name in vars(each) for each in cls.__mro__)
    if is_new and name not in _declared_in(cls, ours):
        _check_name(cls, name, is_ours=False)


def check_call_options(task: str, options: Mapping[str, Any]) -> None:
    """Refuse an option of the task that is given with a call.

    Raises:
        ConfigurationError: Naming the task, the option, and where it belongs.
    """
    for name in options:
        option = _meant(name)
        if (option or name.startswith(_PREFIX)) and name not in (options.get("stamped_headers") or ()):
            if option in FOREIGN_OPTIONS:
                raise ConfigurationError(f"task {task}: {_foreign(option, 'an option', FOREIGN_OPTIONS)}")
            raise ConfigurationError(
                f"task {task}: {name} cannot be given with a call, because options belong to the task; write "
                f"`@app.task(base=SingletonTask, {option or 'lock_...'}=...)`"
            )


def _check_annotation(cls: type[Any], name: str) -> None:
    near = get_close_matches(name.lower(), _OPTIONS, n=1, cutoff=_NEARLY) if name.lower().startswith(_PREFIX) else ()
    if near and name not in _OPTIONS:
        raise ConfigurationError(
            f"task {cls.name}: there is no option {name}; did you mean {near[0]}? An attribute of your own needs a "
            "name that is less like it"
        )


def _check_name(cls: type[Any], name: str, *, is_ours: bool) -> None:
    may_be_near = is_ours and not name.startswith("_") and name not in _OF_CELERY
    meant = _meant(name) if may_be_near or name in FOREIGN_OPTIONS else ""
    if meant in FOREIGN_OPTIONS:
        raise ConfigurationError(f"task {cls.name}: {_foreign(meant, 'an option', FOREIGN_OPTIONS)}")
    if name.lower().startswith(_PREFIX):
        raise ConfigurationError(
            f"task {cls.name}: there is no option {name}{_nearest(name.lower(), _OPTIONS)} An attribute of your "
            "own whose name begins with lock_ has to be annotated in its class, or to be a method or a property"
        )
    if meant:
        raise ConfigurationError(
            f"task {cls.name}: there is no option {name}; did you mean {meant}? An attribute of your own with "
            "such a name has to be annotated in its class, or to be a method or a property"
        )


@lru_cache(maxsize=1000)
def _meant(name: str) -> str:
    """The option, ours or another library's, that a name is or is nearly; empty if there is none."""
    bare = name.lower().removeprefix("singleton_")
    option = _SAID_FOR.get(bare) or _PREFIX + bare.removeprefix(_PREFIX)
    # A name of one word, such as `ttl`, may have any meaning.
    if option in _OPTIONS and ("_" in bare or bare != name.lower()):
        return option
    near = get_close_matches(name.lower(), [*_OPTIONS, *FOREIGN_OPTIONS], n=1, cutoff=_VERY_NEARLY)
    return near[0] if near else ""


def check_setting_names(app: Celery) -> None:
    """Refuse a setting that does not exist, or stands where Celery does not look for it.

    Raises:
        ConfigurationError: Naming the setting, and the one that was probably meant.
    """
    namespace = f"{app.namespace.rstrip('_')}_" if app.namespace else ""
    # Only the names, because a source may make its values when they are read.
    for written in app.conf:
        name = str(written).lower().removeprefix(namespace.lower() or "celery_")
        if name.startswith("singleton_"):
            _check_setting_name(written, name, namespace)


def _check_setting_name(written: str, name: str, namespace: str) -> None:
    is_read = written in (name, _spelt(name, namespace))
    if not (is_read or name.startswith(_ANYWHERE)):
        # The source serves others as well, such as Django's settings.
        return
    if name in FOREIGN_SETTINGS:
        if "celery_singleton" in sys.modules:
            # It serves other tasks of the app.
            return
        raise ConfigurationError(_foreign(name, "a setting", FOREIGN_SETTINGS))
    if name in _SETTINGS and not is_read:
        raise ConfigurationError(f"the setting {written} is not read; write {_spelt(name, namespace)}")
    if name.removeprefix("singleton_") in _OPTIONS and name not in _SETTINGS:
        option = name.removeprefix("singleton_")
        raise ConfigurationError(f"there is no setting {written}: {option} is an option of each task alone")
    if name not in _SETTINGS:
        raise ConfigurationError(
            f"there is no setting {written}{_nearest(name, _SETTINGS, lambda each: _spelt(each, namespace))}"
        )


def _spelt(name: str, namespace: str) -> str:
    """How Celery reads a setting."""
    return (namespace + name).upper() if namespace.isupper() else (namespace + name).lower()


def _declared_in(cls: type[Any], ours: type[Any]) -> set[str]:
    """The options, and the names that are a class's own by their annotation or their kind."""
    known = set(_OPTIONS)
    for each in cls.__mro__:
        if each not in ours.__mro__ and not _is_made_by_celery(each):
            known |= {
                *_annotated(each),
                *(name for name, value in vars(each).items() if hasattr(type(value), "__get__")),
            }
    return known


def _annotated(cls: type[Any]) -> Iterable[str]:
    if _is_made_by_celery(cls):
        return ()
    if sys.version_info >= (3, 14):
        return get_annotations(cls, format=Format.FORWARDREF)
    annotations: Mapping[str, Any] = vars(cls).get("__annotations__", {})
    return annotations


def _is_made_by_celery(cls: type[Any]) -> bool:
    """The annotations of a function, and the arguments of its decorator."""
    return "_decorated" in vars(cls)


def _foreign(name: str, kind: str, table: Mapping[str, tuple[str, str]]) -> str:
    library, counterpart = table[name]
    return f'{name} is {kind} of {library}; here it is {counterpart}: see docs/migrate.md, "From {library}"'


def _nearest(name: str, names: Iterable[str], spelt: Any = str) -> str:
    matches = get_close_matches(name, sorted(names), n=1, cutoff=0.5)
    return f"; did you mean {spelt(matches[0])}?" if matches else f"; there are {', '.join(map(spelt, sorted(names)))}."
