"""Names that are no option and no setting: refused, with the one that was probably meant."""

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from celery import Celery

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
_ANYWHERE = ("singleton_lock_", "singleton_beat_")


def check_option_names(cls: type[Any], ours: type[Any]) -> None:
    """Refuse an option that does not exist.

    A name is a class's own, and no misspelt option, if a class that the user wrote declares it with an annotation, or
    as a method or property.

    Raises:
        ConfigurationError: Naming the task, the option, and the one that was probably meant.
    """
    theirs = [each for each in cls.__mro__ if each not in ours.__mro__]
    known = _OPTIONS.union(*(_declared(each) for each in theirs))
    for name in (name for each in theirs for name in vars(each) if name not in known):
        if name in FOREIGN_OPTIONS:
            raise ConfigurationError(f"task {cls.name}: {_foreign(name, 'an option', FOREIGN_OPTIONS)}")
        if name.lower().startswith("lock_"):
            raise ConfigurationError(
                f"task {cls.name}: there is no option {name}{_nearest(name.lower(), _OPTIONS)} An attribute of your "
                "own whose name begins with lock_ has to be annotated in its class, or to be a method or a property"
            )


def check_setting_names(app: Celery) -> None:
    """Refuse a setting that does not exist, or stands where Celery does not look for it.

    Raises:
        ConfigurationError: Naming the setting, and the one that was probably meant.
    """
    namespace = f"{app.namespace.rstrip('_')}_" if app.namespace else ""
    # The names alone: a source may make its values when they are read.
    for written in app.conf:
        name = str(written).lower().removeprefix(namespace.lower() or "celery_")
        if name.startswith("singleton_"):
            _check_setting_name(written, name, namespace)


def _check_setting_name(written: str, name: str, namespace: str) -> None:
    is_read = written in (name, _spelt(name, namespace))
    if not (is_read or name.startswith(_ANYWHERE)):
        # Of a source that serves others as well, such as Django's settings.
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


def _declared(cls: type[Any]) -> Iterable[str]:
    """The names that are a class's own by their annotation or their kind."""
    if "_decorated" in vars(cls):
        # Celery has made it of a function, its annotations, and what the decorator was given.
        return ()
    if sys.version_info >= (3, 14):
        annotated = get_annotations(cls, format=Format.FORWARDREF)
    else:
        annotated = vars(cls).get("__annotations__", {})
    return {*annotated, *(name for name, value in vars(cls).items() if hasattr(type(value), "__get__"))}


def _foreign(name: str, kind: str, table: Mapping[str, tuple[str, str]]) -> str:
    library, counterpart = table[name]
    return f'{name} is {kind} of {library}; here it is {counterpart}: see docs/migrate.md, "From {library}"'


def _nearest(name: str, names: Iterable[str], spelt: Any = str) -> str:
    matches = get_close_matches(name, sorted(names), n=1, cutoff=0.5)
    return f"; did you mean {spelt(matches[0])}?" if matches else f"; there are {', '.join(map(spelt, sorted(names)))}."
