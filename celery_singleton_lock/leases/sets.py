"""Sets in what makes a lock key: each process has an order of its own for them, so none may decide."""

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NESTED = (list, dict)


def in_order(value: Any, written: Any, text: Callable[[Any], str]) -> Any:
    """*written*, which pydantic has made of *value* as JSON, with the members of each set sorted by their *text*.

    It looks at the models themselves, and not at a second dump, because pydantic cannot dump a set of models as Python.
    """
    if getattr(type(value), "__pydantic_root_model__", False):
        return in_order(value.root, written, text)
    if isinstance(written, dict):
        nested = [name for name, item in written.items() if isinstance(item, _NESTED)]
        parts = _parts(value, written, nested) if nested else {}
        return {**written, **{name: in_order(parts.get(name), written[name], text) for name in nested}}
    if not isinstance(written, list):
        return written
    if isinstance(value, list | set | frozenset | Sequence) and len(value) == len(written):
        pairs = zip(value, written, strict=True)
        written = [in_order(part, item, text) if isinstance(item, _NESTED) else item for part, item in pairs]
    return sorted(written, key=text) if isinstance(value, set | frozenset) else written


def _parts(value: Any, written: Mapping[str, Any], nested: Sequence[str]) -> Mapping[str, Any]:
    """What each *nested* entry of *written* has been made of."""
    if isinstance(value, Mapping):
        # A key that is no text is written in its place.
        return {**dict(zip(written, value.values(), strict=False)), **value}
    kind = type(value)
    fields = {**getattr(kind, "__pydantic_fields__", {}), **getattr(kind, "__pydantic_computed_fields__", {})}
    aliases: dict[str, str] = {}
    if not fields.keys() >= set(nested):
        aliases = {getattr(field, "serialization_alias", field.alias): name for name, field in fields.items()}
    return {name: getattr(value, name if name in fields else aliases.get(name, name), None) for name in nested}


def _has_set(value: Any) -> bool:
    """Whether the text of *value* has the text of a set in it."""
    if isinstance(value, set | frozenset):
        return True
    if isinstance(value, Mapping):
        return any(_has_set(part) for entry in value.items() for part in entry)
    if isinstance(value, list | tuple):
        return any(_has_set(item) for item in value)
    # What pydantic shows of a model, unless the model has a text of its own.
    text_is_by = getattr(type(value).__str__, "__module__", "")
    if hasattr(type(value), "__repr_args__") and text_is_by.startswith("pydantic."):
        return any(_has_set(item) for _, item in value.__repr_args__())
    return False


class FormatterWithoutSets(string.Formatter):
    """As `str.format`, and notes each field that would show a set.

    Attributes:
        refused: These fields, as they stand in the format string.
    """

    def __init__(self) -> None:
        self.refused: list[str] = []

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """As in the base class."""
        found = super().get_field(field_name, args, kwargs)
        if _has_set(found[0]):
            self.refused.append(f"{{{field_name}}}")
        return found
