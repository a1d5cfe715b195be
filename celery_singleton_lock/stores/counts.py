"""How counts are written in a store: one hash for all, with a field for each number."""

BOUNDS = (0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0)
"""Upper bounds of the buckets of a histogram, in seconds; one more bucket has the rest."""

OTHERS = "_other"
"""Stands for a task's name if there are too many names."""

KEPT = 30 * 24 * 3600.0
"""Seconds for which counts are kept if nobody adds to them."""


def hash_of(key: str) -> str:
    """The key of the counts that belong to a lock key. It has no braces, so it is no lock key itself."""
    return key.partition("{")[0] + "stats"


def field_of(name: str, label: str, task: str) -> str:
    """A number's field."""
    return f"{name}:{label}:{task}"


def parts_of(field: str) -> tuple[str, str, str]:
    """Name, label and task of a number."""
    name, _, rest = field.partition(":")
    label, _, task = rest.partition(":")
    return name, label, task
