"""From a call to its lock key: `{prefix}:v3:{<lock name>:<digest>}`.

Two calls have the same key when the wire would make them the same call. The
arguments are bound to the function's parameters, defaults filled in, and
written the way kombu's JSON writes a message, so a publisher and a worker
agree: a tuple is a list, the keys of a dict are text, an enum is its value,
while `1`, `"1"`, `True` and `1.0` stay four different things. A model of pydantic
is what its `model_dump(mode="json")` makes of it, unless that has a set in it:
each process has an order of its own for sets.

The braces are a hash tag of Redis Cluster, and no argument can be read in a key.
The format is a wire format: workers of two releases must agree on it, so a
change needs a new version in the key.
"""

import hashlib
import inspect
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from types import NoneType
from typing import Any

from kombu.utils import json

from celery_singleton_lock.errors import ConfigurationError

MAX_NAME = 200
# Short enough for Redis to keep the lock as a list, which takes half of the memory.
MAX_LABEL = 60
_SURROGATE = re.compile(r"[\ud800-\udfff]")

_PLAIN = frozenset({str, int, float, bool, NoneType})
_TEXT = frozenset({str})

KeyChoice = str | Sequence[str] | Callable[..., Any] | None
Receive = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]]


class _Encoder(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        dump = getattr(type(o), "model_dump", None)
        if dump is None:
            return super().default(o)
        try:
            if not _has_set(o):
                return dump(o, mode="json")
        except Exception as error:
            # The model's own code may raise anything.
            raise ValueError(f"{type(error).__name__}: {error}") from error
        raise ValueError("it has a set, whose order differs from process to process")


_ENCODER = _Encoder(sort_keys=True, separators=(",", ":"))


class KeyMaker:
    """Makes the lock keys of one function.

    Arguments:
        name: First part of every key. Makers with the same name exclude one another.
        signature: The function's signature, without a bound `self`.
        choice: Which arguments count. None: all of them. Names of parameters:
            those. A format string: its text once filled in. A callable: what
            it returns for the arguments as they were passed.
        receive: Turns the arguments of a call into those that the function receives; None if they are the same.
        label: A format string for what operators read beside a key.

    Raises:
        ConfigurationError: The name is empty or too long, or *choice* or *label* names a
            parameter that the function does not have.
    """

    def __init__(
        self,
        name: str,
        signature: inspect.Signature,
        choice: KeyChoice = None,
        receive: Receive | None = None,
        label: str | None = None,
    ) -> None:
        self._name = checked_name(name)
        self._signature = signature
        self._receive = receive
        self._choice = _checked_choice(choice, signature)
        self._label = checked_label("lock_label", label)
        if self._label is not None:
            _check_names("lock_label", label, _fields("lock_label", self._label), signature)
        parameters = signature.parameters
        self._is_usual = all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters.values())
        self._names = list(parameters)
        self._defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        self._needs_only_arguments = not self.runs_user_code and _are_plain(self._defaults.values())

    def key(self, prefix: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The lock key of a call.

        Raises:
            TypeError: The function cannot be called like this.
            ConfigurationError: An argument that counts cannot be serialised.
            Exception: Any error of *receive*.
        """
        if self._receive is not None:
            args, kwargs = self._receive(args, kwargs)
        subject = self._bound(args, kwargs) if self._choice is None else self._subject(args, kwargs)
        return f"{prefix}:v3:{{{self._name}:{digest(subject)}}}"

    def key_of_some(self, prefix: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The same, where the arguments that do not count may be missing: for people, who look for a lock.

        Raises:
            TypeError: An argument that counts is missing, or the function has no such parameter.
        """
        choice = self._choice
        if self._receive is not None or choice is None or callable(choice):
            return self.key(prefix, args, kwargs)
        bound = self._signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        for name in _fields("lock_key", choice) if isinstance(choice, str) else choice:
            if name not in bound.arguments:
                raise TypeError(f"missing a required argument: {name!r}")
        return key_of(prefix, self._name, _chosen(choice, bound.arguments))

    def label(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What operators read beside the key of a call: one short line; empty without a format string.

        Raises:
            Exception: Any error of formatting the arguments, or of *receive*.
        """
        if self._label is None:
            return ""
        if self._receive is not None:
            args, kwargs = self._receive(args, kwargs)
        text = self._label.format(**_plain_items(self._bound(args, kwargs)))
        line = "".join(letter if letter.isprintable() else " " for letter in text[: MAX_LABEL + 1]).strip()
        return line if len(text) <= MAX_LABEL else f"{line[: MAX_LABEL - 1]}…"

    @property
    def runs_user_code(self) -> bool:
        """Making a key runs a callable or a model, or formats arguments, and each of these may do anything."""
        return callable(self._choice) or isinstance(self._choice, str) or self._receive is not None

    def makes_any_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Making a key of such arguments runs no user code and cannot fail, so it can be left to the worker."""
        return self._needs_only_arguments and _are_plain(args) and (not kwargs or _are_plain(kwargs.values()))

    def _subject(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        choice = self._choice
        if callable(choice):
            self._signature.bind(*args, **kwargs)
            return _made_by_user(choice, lambda: choice(*args, **kwargs))
        arguments = self._bound(args, kwargs)
        assert choice is not None
        return _chosen(choice, arguments)

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments by the names of their parameters, defaults filled in."""
        if self._is_usual and not kwargs and len(args) == len(self._names):
            return dict(zip(self._names, args, strict=True))
        if self._is_usual and len(args) <= len(self._names):
            given = {**dict(zip(self._names, args, strict=False)), **kwargs}
            arguments = {**self._defaults, **given}
            if len(given) == len(args) + len(kwargs) and arguments.keys() == self._signature.parameters.keys():
                # What `bind` does, in a fraction of the time.
                return arguments
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments


def _are_plain(values: Iterable[Any]) -> bool:
    return _PLAIN.issuperset(map(type, values))


def _plain_items(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in arguments.items()}


def _chosen(choice: str | Sequence[str], arguments: Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return _formatted(choice, arguments)
    return {name: arguments[name] for name in choice}


def _formatted(choice: str, arguments: Mapping[str, Any]) -> str:
    formatter = _Formatter()
    text: str = _made_by_user(choice, lambda: formatter.vformat(choice, (), _plain_items(arguments)))
    if formatter.refused:
        raise ConfigurationError(
            f"lock_key={choice!r} is not possible for this call: {', '.join(formatter.refused)} shows a set, and the "
            "text of a set differs from process to process; give a callable that returns sorted(...)"
        )
    return text


class _Formatter(string.Formatter):
    """As `str.format`, and notes each field that would show a set."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found = super().get_field(field_name, args, kwargs)
        if _has_set(found[0]):
            self.refused.append(f"{{{field_name}}}")
        return found


def _has_set(value: Any) -> bool:
    """Whether a set is somewhere in *value*, or in what a model dumps."""
    if hasattr(type(value), "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return any(map(_has_set, value.keys())) or any(map(_has_set, value.values()))
    return isinstance(value, AbstractSet) or (isinstance(value, list | tuple) and any(map(_has_set, value)))


def _made_by_user(choice: Any, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise ConfigurationError(
            f"lock_key={choice!r} fails for this call ({type(error).__name__}: {error}); correct it, or name parameters"
        ) from error


def key_of(prefix: str, name: str, subject: Any) -> str:
    """The lock key for a checked name and what distinguishes the calls that share it."""
    return f"{prefix}:v3:{{{name}:{digest(subject)}}}"


def start_of_keys(prefix: str) -> str:
    """How each lock key of an app begins, up to its name."""
    return f"{prefix}:v3:{{"


def digest(subject: Any) -> str:
    """Thirty-two hexadecimal digits that stand for *subject*.

    Raises:
        ConfigurationError: *subject* cannot be written as kombu's JSON.
    """
    try:
        text = _ENCODER.encode(plain(subject))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"lock_key: {_shown(subject)} cannot be serialised ({error}); "
            "name the parameters that count, or give a callable that returns plain values"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _shown(subject: Any) -> str:
    try:
        return f"{subject!r:.200}"
    except Exception:  # noqa: BLE001 (it is too deep, too long a number, or a class of the user's)
        return f"a value of type {type(subject).__name__}"


def plain(value: Any) -> Any:
    """*value* as it looks after a trip over the wire; other types are left to kombu."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if type(value) is dict and _PLAIN.issuperset(map(type, value.values())) and _TEXT.issuperset(map(type, value)):
        return value
    if isinstance(value, Mapping):
        return {_json_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _json_key(key: Any) -> str:
    key = plain(key)
    return key if isinstance(key, str) else json.dumps(key)


def checked_name(name: Any) -> str:
    """*name* as it stands in a key.

    Raises:
        ConfigurationError: It is no text, empty or too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ConfigurationError(f"lock_name={name!r:.80} is not allowed: give a text of 1 to {MAX_NAME} characters")
    # A brace would end the hash tag early, and two names must never become one.
    return _SURROGATE.sub(_as_bytes, name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D"))


def _as_bytes(half: re.Match[str]) -> str:
    """Half of a character, which cannot be sent as it is."""
    return "".join(f"%{byte:02X}" for byte in half[0].encode("utf-8", "surrogatepass"))


def checked_label(name: str, value: Any) -> str | None:
    """*value*, if it can be a format string.

    Raises:
        ConfigurationError: It is no text.
    """
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(
            f"{name}={value!r:.80} is not allowed: give a format string with at least one {{parameter}}"
        )
    return value


def _checked_choice(choice: KeyChoice, signature: inspect.Signature) -> KeyChoice:
    if choice is None or callable(choice):
        return choice
    if isinstance(choice, str) and choice in signature.parameters:
        # A comma was forgotten, and the parentheses mean nothing.
        raise ConfigurationError(
            f"lock_key={choice!r} is the name of a parameter and no format string; did you mean "
            f'("{choice}",) or "{{{choice}}}"?'
        )
    if isinstance(choice, str):
        _check_names("lock_key", choice, _fields("lock_key", choice), signature)
        return choice
    if isinstance(choice, list | tuple) and all(isinstance(name, str) for name in choice):
        _check_names("lock_key", choice, choice, signature)
        return tuple(choice)
    raise ConfigurationError(
        f"lock_key={choice!r} is not allowed: give None, a list of parameter names, "
        "a format string with at least one {parameter}, or a callable"
    )


def _fields(option: str, template: str) -> list[str]:
    fields = _parsed(option, template, template)
    if not fields:
        whole = "; to lock the task as a whole use lock_key=()" if option == "lock_key" else ""
        raise ConfigurationError(f"{option}={template!r} names no {{parameter}}{whole}")
    return [field.partition(".")[0].partition("[")[0] for field in fields]


def _parsed(option: str, text: str, template: str) -> list[str]:
    """The fields in *text*, a part of *template*, and those inside their format specifications."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigurationError(f"{option}={template!r} is not a format string: {error}") from error
    fields = []
    for _, field, specification, conversion in parts:
        if conversion not in (None, *"sra"):
            raise ConfigurationError(
                f"{option}={template!r} is not a format string: there is no conversion !{conversion}, only !s, !r and "
                "!a"
            )
        if field is not None:
            fields += [field, *_parsed(option, specification or "", template)]
    return fields


def _check_names(option: str, choice: Any, names: Sequence[str], signature: inspect.Signature) -> None:
    for name in names:
        if name not in signature.parameters:
            raise ConfigurationError(
                f"{option}={choice!r}: unknown parameter {name!r}; "
                f"the function has {', '.join(signature.parameters) or 'no parameters'}"
            )
