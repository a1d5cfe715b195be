"""Rows of factors in which every pair of values comes to occur soon."""

import random
from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

from tests.combinations.factors import FACTORS, Row, why_not

# So many are drawn for each row; the one with most pairs that have not occurred yet is taken.
_DRAWN = 12
Pair = tuple[tuple[str, Any], ...]


def possible() -> set[Pair]:
    """The pairs of values that no reason forbids."""
    return {
        pair
        for names in combinations(FACTORS, 2)
        for values in product(*(FACTORS[name] for name in names))
        if why_not(dict(pair := tuple(zip(names, values, strict=True)))) is None
    }


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(((name, row[name]) for name in FACTORS if name in row), 2))


def covering(rng: random.Random, missing: set[Pair], names: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is *given* and a value of each of these factors, with many of the *missing* pairs, which are taken out."""
    rows = [_drawn(rng, list(names), given) for _ in range(_DRAWN)]
    best = max(rows, key=lambda row: len(pairs_of(row) & missing))
    missing -= pairs_of(best)
    return best


def _drawn(rng: random.Random, names: list[str], given: Mapping[str, Any]) -> dict[str, Any]:
    while True:
        row = dict(given)
        rng.shuffle(names)
        for name in names:
            allowed = [value for value in FACTORS[name] if why_not({**row, name: value}) is None]
            if name in row or not allowed:
                continue
            row[name] = rng.choice(allowed)
        if all(name in row for name in names):
            return row
