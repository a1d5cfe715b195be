"""The lock key of a call, `{prefix}:v3:{<lock name>:<digest of the arguments>}`, and its label.

Two calls have the same key if the arguments that count are equal, with defaults filled in. Arguments are compared as
JSON carries them: a tuple equals a list, and an enum its value. `1`, `"1"`, `True` and `1.0` differ.

A change of the format needs a new version in the key, because workers of two releases must make equal keys.
"""

import hashlib
import inspect
import re
import string
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import partial
from json import encoder
from typing import Any

from celery import Celery
from celery.app import base
from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils import json

from celery_singleton_lock.definition.options import KeyChoice, is_unicode, not_allowed, option_of, prefix_of, setting
from celery_singleton_lock.errors import ConfigurationError, LockLost
from celery_singleton_lock.log import log

MAX_NAME = 200
_LONGEST_NAME_OF_BEAT = 100
# A value of more than 64 bytes would double the memory of its hash in Redis.
MAX_LABEL = 60
_PLAIN = frozenset({str, int, float, bool, types.NoneType})
_TEXT = frozenset({str})

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Receive = Callable[[Args, Kwargs], tuple[Args, Kwargs]]


class _Encoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        if not hasattr(type(o), "model_dump"):
            return super().default(o)
        try:
            if not _has_set(o):
                return o.model_dump(mode="json")
        except (SoftTimeLimitExceeded, LockLost):
            raise
        except Exception as error:
            # A computed field may raise anything.
            raise ValueError(f"{type(error).__name__}: {error}") from error
        raise ValueError("it has a set, whose order differs from process to process")


_ENCODER = _Encoder(sort_keys=True, separators=(",", ":"))
# They must write the same text as `_ENCODER.encode`, and are faster.
_WRITERS: Mapping[type, Callable[[Any], str]] = {
    str: encoder.encode_basestring_ascii,
    int: int.__repr__,
    bool: {True: "true", False: "false"}.__getitem__,
    types.NoneType: {None: "null"}.__getitem__,
}


def key_of(prefix: str, name: str, subject: Any) -> str:
    """*name* has to come from `checked_name`. Equal subjects make equal keys."""
    return _key(f"{start_of_keys(prefix)}{name}:", _written(subject))


def _key(start: str, text: str) -> str:
    return f"{start}{hashlib.sha256(text.encode()).hexdigest()[:32]}}}"


def _written(subject: Any) -> str:
    try:
        return str(_ENCODER.encode(plain(subject)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"lock_key: {_unserialisable_in(subject)} cannot be serialised ({error}); "
            "name the parameters that count, or give a callable that returns plain values"
        ) from error


def _unserialisable_in(subject: Any) -> str:
    for name, value in subject.items() if isinstance(subject, Mapping) else ():
        try:
            _ENCODER.encode(plain({name: value}))
        except (TypeError, ValueError, RecursionError):
            return f"{name!r}, a value of type {type(value).__name__},"
    return f"a value of type {type(subject).__name__}"


BEAT = "celery.beat"
"""The task name of a beat that leads, and the beginning of its lock name."""


def beat_key_of(app: Celery) -> str:
    name = setting(app, "singleton_beat_name")
    if name is not None:
        checked_name(name, "singleton_beat_name", _LONGEST_NAME_OF_BEAT)
    return key_of(prefix_of(app), checked_name(f"{BEAT}.{name or app.main}"), {})


def start_of_keys(prefix: str) -> str:
    return f"{prefix}:v3:{{"


def checked_name(name: Any, option: str = "lock_name", longest: int = MAX_NAME) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= longest or not is_unicode(name):
        raise not_allowed(option, name, f"give a text of 1 to {longest} characters that UTF-8 can encode")
    # A brace would end the hash tag early. An unescaped percent sign would let two names collide.
    return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


def plain(value: Any) -> Any:
    """*value* as a worker gets it through JSON. Types that JSON lacks are left to kombu's encoder."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict and _PLAIN.issuperset(map(type, value.values())) and _TEXT.issuperset(map(type, value)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        names = [name if isinstance(name, str) else json.dumps(name) for name in map(plain, value)]
        return dict(zip(names, map(plain, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    return value


class KeyMaker:
    def __init__(self, task: Any, prefix: str = "") -> None:
        body = inspect.getattr_static(type(task), "run")
        function = getattr(body, "__func__", body)
        signature = inspect.signature(function)
        if not isinstance(body, staticmethod):
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self._signature = signature
        # With `typing=False` Celery does not check the arguments of a call.
        self._binds = task.typing is not False
        self._receive = _receiver_of(task, function, signature)
        self._choice: KeyChoice = option_of(task, "key")
        self._label: Any = option_of(task, "label")
        try:
            self._start = f"{start_of_keys(prefix)}{checked_name(lock_name_of_task(task))}:"
            self._counting = _names_in("lock_key", self._choice, signature)
            if isinstance(self._label, str):
                _names_in("lock_label", self._label, signature)
        except ConfigurationError as error:
            raise ConfigurationError(f"task {task.name}: {error}") from None
        parameters = signature.parameters
        self._is_usual = all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters.values())
        self._names = dict.fromkeys(parameters).keys()
        self._defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        # A format string calls `__format__` of the arguments.
        self.runs_user_code = callable(self._choice) or isinstance(self._choice, str) or self._receive is not None
        self.needs_only_plain: bool = not self.runs_user_code and are_plain(self._defaults.values())
        self._in_text = sorted(self._names if self._counting is None else set(self._counting))
        self._text = f"{{{','.join(f'{_WRITERS[str](name)}:%s' for name in self._in_text)}}}"
        # For the fast path in `key`.
        is_written_here = self._is_usual and not self.runs_user_code
        self._positions = [list(parameters).index(name) for name in self._in_text] if is_written_here else None
        self._has_bare_fields = isinstance(self._choice, str) and all(map(str.isidentifier, _fields_in(self._choice)))

    def key(self, args: Args, kwargs: Kwargs) -> str:
        """Raises pydantic's `ValidationError` if a model refuses an argument."""
        if self._positions is not None and not kwargs and len(args) == len(self._names):
            try:
                values = []
                for position in self._positions:
                    value = args[position]
                    values.append(_WRITERS[type(value)](value))
                return _key(self._start, self._text % (*values,))
            except (KeyError, ValueError):
                pass  # see `_text_of`
        choice = self._choice
        if self._receive is not None:
            args, kwargs = self._receive(args, kwargs)
        if callable(choice):
            if self._binds:
                self._signature.bind(*args, **kwargs)
            made = _made_by_user(choice, lambda: choice(*args, **kwargs))
            if made is None:
                raise ConfigurationError(
                    f"lock_key={choice!r} returned None for this call; return (), or another constant, to give all "
                    "such calls one key; to count every argument, set lock_key=None on the task"
                )
            return _key(self._start, _written(made))
        return _key(self._start, self._text_of(self._bound(args, kwargs)))

    def key_of_some(self, args: Args, kwargs: Kwargs) -> str:
        """As `key`, but arguments that do not make the key may be missing."""
        if self._receive is not None or self._counting is None:
            return self.key(args, kwargs)
        bound = self._signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        for name in self._counting:
            if name not in bound.arguments:
                raise TypeError(f"missing a required argument: {name!r}")
        return _key(self._start, self._text_of(bound.arguments))

    def label(self, args: Args, kwargs: Kwargs) -> str:
        if self._receive is not None:
            args, kwargs = self._receive(args, kwargs)
        text = self._label.format(**_plain_items(self._bound(args, kwargs)))
        line = "".join(letter if letter.isprintable() else " " for letter in text[: MAX_LABEL + 1]).strip()
        return line if len(text) <= MAX_LABEL else f"{line[: MAX_LABEL - 1]}…"

    def _text_of(self, arguments: Mapping[str, Any]) -> str:
        choice = self._choice
        if isinstance(choice, str):
            fill = partial(choice.format_map, arguments)
            if not (self._has_bare_fields and are_plain(arguments.values())):
                # `_FORMATTER` refuses sets, but is much slower than `format_map`.
                fill = partial(_FORMATTER.vformat, choice, (), _plain_items(arguments))
            return _WRITERS[str](_made_by_user(choice, fill))
        try:
            values = map(arguments.__getitem__, self._in_text)
            return self._text % tuple([_WRITERS[type(value)](value) for value in values])
        except (KeyError, ValueError):
            # A type without a writer, or an int with more digits than Python converts.
            return _written(arguments if self._counting is None else {name: arguments[name] for name in self._counting})

    def _bound(self, args: Args, kwargs: Kwargs) -> Mapping[str, Any]:
        if self._is_usual and len(args) <= len(self._names):
            by_position = dict(zip(self._names, args, strict=False))
            arguments = {**self._defaults, **by_position, **kwargs}
            if arguments.keys() == self._names and by_position.keys().isdisjoint(kwargs):
                # Equal to the result of `bind`, but faster.
                return arguments
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments


def are_plain(values: Iterable[Any]) -> bool:
    return _PLAIN.issuperset(map(type, values))


def _plain_items(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in arguments.items()}


class _Formatter(string.Formatter):
    def get_field(self, field_name: str, args: Args, kwargs: Kwargs) -> Any:
        found = super().get_field(field_name, args, kwargs)
        if _has_set(found[0]):
            raise ValueError(
                f"{{{field_name}}} shows a set, and the text of a set differs from process to process; give a "
                "callable that returns sorted(...)"
            )
        return found


_FORMATTER = _Formatter()


def _has_set(value: Any) -> bool:
    if hasattr(type(value), "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return isinstance(value, AbstractSet) or (isinstance(value, list | tuple) and any(map(_has_set, value)))


def _made_by_user(choice: Any, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (SoftTimeLimitExceeded, LockLost):
        raise
    except Exception as error:
        raise ConfigurationError(
            f"lock_key={choice!r} fails for this call ({type(error).__name__}: {error}); correct it, or name parameters"
        ) from error


def _names_in(option: str, choice: KeyChoice, signature: inspect.Signature) -> list[str] | None:
    """None if all parameters count, or a callable decides."""
    if choice is None or callable(choice):
        return None
    parameters = signature.parameters
    if isinstance(choice, str):
        names = _parameters_in(option, choice)
    elif isinstance(choice, list | tuple) and all(isinstance(name, str) for name in choice):
        names = list(choice)
    else:
        advice = "give None, a list of parameter names, a format string with at least one {parameter}, or a callable"
        raise not_allowed("lock_key", choice, advice)
    for name in names:
        if name not in parameters:
            has = ", ".join(parameters) or "no parameters"
            raise ConfigurationError(f"{option}={choice!r}: unknown parameter {name!r}; the function has {has}")
    return names


def _parameters_in(option: str, template: str) -> list[str]:
    try:
        names = [re.split(r"[.\[]", field)[0] for field in _fields_in(template)]
    except ValueError as error:
        raise ConfigurationError(f"{option}={template!r} is not a format string: {error}") from error
    if not names:
        other = '; write ("x",) or "{x}" to count a parameter x, or lock_key=() to lock the task as a whole'
        raise ConfigurationError(f"{option}={template!r} names no {{parameter}}{other if option == 'lock_key' else ''}")
    return names


def _fields_in(text: str) -> Iterator[str]:
    for _, field, specification, conversion in string.Formatter().parse(text):
        if conversion not in (None, *"sra"):
            raise ValueError(f"there is no conversion !{conversion}, only !s, !r and !a")
        if field is not None:
            yield field
            yield from _fields_in(specification or "")


def lock_name_of_task(task: Any) -> Any:
    name = option_of(task, "name")
    return task.name if name is None else name


def _receiver_of(task: Any, body: Any, signature: inspect.Signature) -> Receive | None:
    """A function that converts arguments as `pydantic=True` does; None for a task without that option."""
    # Celery does not store `pydantic=True`, but wraps the body in a function from `celery.app.base`.
    if getattr(body, "__globals__", None) is not vars(base) or not hasattr(body, "__wrapped__"):
        return None
    from celery.utils.annotations import annotation_issubclass, get_optional_arg  # noqa: PLC0415
    from pydantic import BaseModel, TypeAdapter  # noqa: PLC0415

    try:
        hints = typing.get_type_hints(body.__wrapped__)
    except (NameError, AttributeError, TypeError):
        hints = inspect.get_annotations(body.__wrapped__)
    is_model = partial(annotation_issubclass, cls=BaseModel)
    models = {name: TypeAdapter(hint) for name, hint in hints.items() if is_model(get_optional_arg(hint) or hint)}
    context = {"celery_app": task.app, "celery_task_name": task.name}
    kinds = {name: each.kind for name, each in signature.parameters.items()}
    positions = [name for name, kind in kinds.items() if kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]

    def made(name: str, value: Any) -> Any:
        return models[name].validate_python(value, context=context) if name in models else value

    def receive(args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Keep positional arguments positional: a callable `lock_key` gets them as they were given.
        passed = [made(name, value) for name, value in zip(positions, args, strict=False)]
        named = {name: made(name, value) if name in kinds else value for name, value in kwargs.items()}
        return [*passed, *args[len(positions) :]], named

    return receive


def label_of(task: Any, key: str, task_id: str, args: Args, kwargs: Kwargs) -> str:
    """Empty if the task has no label, or if making it fails."""
    if task.lock_options.label is None:
        return ""
    try:
        label: str = task._lock_keys.label(args, kwargs)  # noqa: SLF001 (it is this library's)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 (arguments and their formats are the user's)
        why = f"{type(error).__name__}: {error}"
        log.warning("lock.label_failed", "lock_label fails for this call (%.200s)", why, key=key, task_id=task_id)
        return ""
    log.remember_label(task_id, label)
    return label
