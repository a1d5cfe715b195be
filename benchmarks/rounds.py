"""Short rounds of several actions in turn, so that whatever else the machine does falls on all alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

T = TypeVar("T")

# In a row, what the unit is measured as a second time: how far two equal things are apart.
AGAIN = "the unit again"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of many numbers between their quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """The spread of *numbers*, which may be a single one."""
        return cls(*statistics.quantiles(numbers, n=4)) if len(numbers) > 1 else cls(*numbers, *numbers, *numbers)


def seconds_per_call(action: Callable[[], object], calls: int) -> float:
    """The mean of one round."""
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls


def interleaved(actions: Mapping[str, tuple[Callable[[], object], int]], cycles: int) -> dict[str, list[float]]:
    """Seconds per call of each action, one number per cycle.

    Arguments:
        actions: What to do, and how often in one round.
        cycles: How many rounds of each.
    """
    for action, _ in actions.values():
        # Connect, load the script, start the thread.
        action()
    return in_turns({name: partial(seconds_per_call, *round_) for name, round_ in actions.items()}, cycles)


def in_turns(rounds: Mapping[str, Callable[[], T]], cycles: int) -> dict[str, list[T]]:
    """The results of each round, one per cycle.

    Arguments:
        rounds: What to measure, by name.
        cycles: How often, in another order each time: a round that always
            followed its like would find the caches warm.
    """
    order = list(rounds)
    found: dict[str, list[T]] = {name: [] for name in rounds}
    for _ in range(cycles):
        random.shuffle(order)
        for name in order:
            found[name].append(rounds[name]())
    return found


def ratio(seconds: Sequence[float], unit: Sequence[float]) -> Spread:
    """The first as multiples of the second, cycle by cycle."""
    return Spread.of([one / other for one, other in zip(seconds, unit, strict=True)])


def difference(seconds: Sequence[float], unit: Sequence[float]) -> Spread:
    """By how many microseconds the first are more than the second, cycle by cycle."""
    return Spread.of([1e6 * (one - other) for one, other in zip(seconds, unit, strict=True)])
