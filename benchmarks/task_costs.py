"""The rows of the tables of the tasks, made of what the rounds have measured."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from benchmarks import report
from benchmarks.libraries import PLAIN, late
from benchmarks.report import Row
from benchmarks.rounds import Spread, difference, ratio
from benchmarks.runner import Count, Timing

# Beside those with `acks_late`: what that costs plain Celery.
EARLY = f"{PLAIN}, acks early"

Each = TypeVar("Each")
# From what is measured to the name of its target.
Asked = Callable[[str], str]
Compared = Callable[[Sequence[float], Sequence[float]], Spread]


def of_one_kind(found: Mapping[str, Each], acks_late: bool) -> dict[str, Each]:
    """The results with, or without, `acks_late`, by the names of the libraries."""
    kind = {
        label.removesuffix(late("")): each for label, each in found.items() if label.endswith(late("")) == acks_late
    }
    return kind | ({EARLY: found[PLAIN]} if acks_late and found else {})


def timings(found: Mapping[str, list[Timing]], asked: Asked) -> list[Row]:
    """Shares of plain Celery's throughput, multiples of its time, and microseconds above it; beside plain's own."""

    def row(what: str, unit: str, compared: Compared, of: str) -> Row:
        return _row(what, unit, compared, _each(found, of), asked(what))

    above = "µs above plain"
    return [
        row(report.PUBLISHED_AND_RUN, PLAIN, _share, "published_and_run"),
        row(report.RUN, PLAIN, _share, "run"),
        row(report.PROCESSOR, PLAIN, ratio, "processor"),
        row(report.PUBLISHER, above, difference, "publisher"),
        row(report.MAIN, above, difference, "main"),
        row(report.POOL, above, difference, "pool"),
        row(report.SERVER, above, difference, "server"),
        row(report.PUBLISHED, PLAIN, _share, "published"),
        row(report.START, PLAIN, ratio, "start"),
    ]


def instructions(found: Mapping[str, list[Count]]) -> list[Row]:
    """Thousands above plain's, and multiples."""
    if not found:
        return []
    row = partial(_row, scale=1e-3)
    above = "thousands above plain"
    return [
        row(report.INSTRUCTIONS, PLAIN, ratio, _each(found, "worker")),
        row(report.MAIN_INSTRUCTIONS, above, _thousands, _each(found, "main")),
        row(report.CHILDREN_INSTRUCTIONS, above, _thousands, _each(found, "children")),
        row(report.SERVER_INSTRUCTIONS, above, _thousands, _each(found, "server")),
    ]


def _each(found: Mapping[str, Sequence[Timing | Count]], of: str) -> dict[str, list[float]]:
    return {label: [getattr(one, of) for one in each] for label, each in found.items()}


def _row(
    what: str,
    unit: str,
    compared: Compared,
    numbers: Mapping[str, list[float]],
    asked: str = "",
    scale: float = 1e6,
) -> Row:
    values = {label: compared(each, numbers[PLAIN]) for label, each in numbers.items() if label != PLAIN}
    return Row(what, unit, values, Spread.of([scale * one for one in numbers[PLAIN]]), asked)


def _share(seconds: Sequence[float], unit: Sequence[float]) -> Spread:
    return ratio(unit, seconds)


def _thousands(counts: Sequence[float], unit: Sequence[float]) -> Spread:
    return difference([1e-9 * one for one in counts], [1e-9 * one for one in unit])
