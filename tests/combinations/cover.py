"""Rows in which every pair of factors occurs and every triple of mode, policy and event; what some of them cover.

It takes minutes to make them, so they are kept beside this file. After a change of the factors or of their reasons,
`python -m tests.combinations.cover` makes them anew, under the newest Celery; an older one has more reasons, and fewer
rows.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

from covertable import make

from tests.combinations.factors import CALL, FACTORS, REASONS, STAGE, TASK, TRIPLES, Row, why_not

KEPT = Path(__file__).with_name("rows.json")


@cache
def stages() -> tuple[dict[str, Any], ...]:
    """Brokers, pools and result backends, each with each other: workers are dear, so there are few."""
    usual = {"broker": "redis", "results": "redis", "pool": "prefork", "track": False}
    usuals = [{**usual, "redelivers": redelivers} for redelivers in STAGE["redelivers"]]
    return tuple(make(STAGE, presets=usuals, constraints=_constraints(STAGE)))


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """The covering array, the same each time."""
    return tuple(row for row in json.loads(KEPT.read_text(encoding="utf-8"))["rows"] if why_not(row) is None)


def keep_rows() -> None:
    """Make them, and write a line for each."""
    lines = ",\n".join(json.dumps(row) for row in _made())
    KEPT.write_text(f'{{"of": "{digest()}", "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def digest() -> str:
    """What the rows depend on."""
    return hashlib.sha256(Path(__file__).with_name("factors.py").read_bytes()).hexdigest()[:12]


def _made() -> list[dict[str, Any]]:
    made = make(
        {"stage": range(len(stages())), **TASK, **CALL},
        sub_models=[
            {"fields": list(dict.fromkeys("stage" if name in STAGE else name for name in names)), "strength": 3}
            for names in TRIPLES
            if not set(names) & set(STAGE)
        ],
        presets=[
            {"stage": _redelivering(), "late": True, "mode": mode, "policy": policy}
            for mode, policy in product(TASK["mode"], TASK["policy"])
            if why_not({"mode": mode, "policy": policy, "redelivers": True}) is None
        ],
        constraints=_constraints(FACTORS),
    )
    return [_spread(row) for row in made]


def _redelivering() -> int:
    """A stage where whatever its tasks declare can be delivered twice."""
    return next(
        number
        for number, stage in enumerate(stages())
        if stage["redelivers"] and stage["pool"] == "prefork" and stage["results"] in ("redis", "database")
    )


def _constraints(known: Iterable[str]) -> list[dict[str, Any]]:
    """The reasons that speak of known factors only, in the words of covertable."""
    return [
        _constraint(
            tuple(dict.fromkeys("stage" if name in STAGE and known is FACTORS else name for name in names)), applies
        )
        for names, applies in REASONS.values()
        if set(names) <= set(known)
    ]


def _constraint(names: Sequence[str], applies: Callable[[Row], bool]) -> dict[str, Any]:
    """It is asked for the same few values very often."""
    told: dict[tuple[Any, ...], bool] = {}

    def is_allowed(row: Row) -> bool:
        values = tuple(row[name] for name in names)
        if values not in told:
            told[values] = not applies(_spread(dict(zip(names, values, strict=True))))
        return told[values]

    return {"operator": "fn", "requires": list(names), "evaluate": is_allowed}


def _spread(row: Row) -> dict[str, Any]:
    """A row with the factors of its stage in place of the stage's number."""
    rest = {name: value for name, value in row.items() if name != "stage"}
    return {**(stages()[row["stage"]] if "stage" in row else {}), **rest}


@dataclass(frozen=True)
class Covered:
    """How many tuples of values have occurred, of how many that may."""

    pairs: int
    of_pairs: int
    triples: int
    of_triples: int

    def __str__(self) -> str:
        return f"{self.pairs} of {self.of_pairs} pairs and {self.triples} of {self.of_triples} triples"


def covered(seen: Iterable[Row]) -> Covered:
    """What these rows have covered."""
    seen = list(seen)
    pairs, triples = possible(combinations(FACTORS, 2)), possible(TRIPLES)
    return Covered(len(_in(seen, pairs)), len(pairs), len(_in(seen, triples)), len(triples))


def possible(tuples: Iterable[Sequence[str]]) -> set[tuple[tuple[str, Any], ...]]:
    """The tuples of values that no reason forbids."""
    return {
        some
        for names in tuples
        for values in product(*(FACTORS[name] for name in names))
        if why_not(dict(some := tuple(zip(names, values, strict=True)))) is None
    }


def _in(seen: Iterable[Row], wanted: set[tuple[tuple[str, Any], ...]]) -> set[tuple[tuple[str, Any], ...]]:
    names = {tuple(name for name, _ in some) for some in wanted}
    return {some for row in seen for group in names if (some := tuple(_items(row, group))) in wanted}


def _items(row: Row, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    return ((name, row[name]) for name in names)


if __name__ == "__main__":
    keep_rows()
