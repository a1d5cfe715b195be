"""The finding of one check of a deployment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """An answer to one question.

    Attributes:
        name: What was looked at.
        ok: None if it could not be looked at, which is no fault.
        detail: What was found, and what to do about it.
    """

    name: str
    ok: bool | None
    detail: str

    def as_json(self) -> dict[str, Any]:
        """As JSON, with the names of the docs."""
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


def a_few(names: Sequence[str]) -> str:
    """The first few, and the number of the others."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
