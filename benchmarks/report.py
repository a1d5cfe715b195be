"""The table on the screen, the JSON beside it, and whether the targets are met."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.candidates import OURS, PYTHON_REDIS_LOCK, REDIS_PY
from benchmarks.rounds import Spread

PAIR = "acquire + release"
CONFLICT = "conflict decided"
RENEWAL = "1,000 leases renewed"
SCRIPT = "longest script of a renewal"
TURN = "others wait for a renewal"
HAND_OFF = "hand-off to a waiter"
PAIR_COMMANDS = "commands of acquire + release"
CONFLICT_COMMANDS = "commands of a conflict"
MEMORY = "memory of a held lock"


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of ours, given the medians of all."""

    text: str
    met: Callable[[Mapping[str, float]], bool]


def _at_most(limit: float) -> Target:
    return Target(f"{limit:g}", lambda cost: cost[OURS] <= limit)


TARGETS = {
    PAIR: Target("2.3 and redis-py's", lambda cost: cost[OURS] <= min(2.3, cost[REDIS_PY])),
    CONFLICT: _at_most(1.4),
    RENEWAL: _at_most(25),
    SCRIPT: _at_most(0.2),
    TURN: _at_most(0.2),
    HAND_OFF: Target("12 or python-redis-lock's", lambda cost: cost[OURS] <= max(12, cost[PYTHON_REDIS_LOCK])),
    PAIR_COMMANDS: _at_most(2),
    CONFLICT_COMMANDS: _at_most(1),
    MEMORY: _at_most(400),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One cost, of all who have it, in one unit."""

    what: str
    unit: str
    values: Mapping[str, Spread]

    @property
    def target(self) -> Target:
        """What it may cost."""
        return TARGETS[self.what]

    @property
    def met(self) -> bool:
        """By the medians."""
        return self.target.met({who: spread.median for who, spread in self.values.items()})


@dataclass(frozen=True, slots=True)
class ServerReport:
    """All rows of one server, and how many microseconds a PING takes there."""

    server: str
    version: str
    ping: Spread
    rows: Sequence[Row]


def save(reports: Sequence[ServerReport], path: Path) -> None:
    """Write everything as JSON, for a later comparison."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({report.server: _plain(report) for report in reports}, indent=2) + "\n")


def _plain(report: ServerReport) -> dict[str, Any]:
    rows = [
        {
            "what": row.what,
            "unit": row.unit,
            "target": row.target.text,
            "met": row.met,
            "values": {who: asdict(spread) for who, spread in row.values.items()},
        }
        for row in report.rows
    ]
    return {"version": report.version, "ping_microseconds": asdict(report.ping), "rows": rows}


def show(report: ServerReport, console: Console) -> None:
    """One table per server: the median, and below it the quartiles."""
    title = f"{report.server} {report.version}, where a PING takes {_text(report.ping.median)} µs"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", OURS.replace("-", " "), REDIS_PY, PYTHON_REDIS_LOCK.replace("-", " "), "at most", ""):
        table.add_column(heading, overflow="fold")
    for row in report.rows:
        costs = [_cell(row.values.get(who)) for who in (OURS, REDIS_PY, PYTHON_REDIS_LOCK)]
        what = f"{row.what}, {row.unit}" if row.unit else row.what
        table.add_row(what, *costs, row.target.text, "met" if row.met else "[bold red]missed")
    console.print(table)


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.low == spread.high:
        return _text(spread.median)
    return f"{_text(spread.median)}\n[dim]{_text(spread.low)}-{_text(spread.high)}"


def _text(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
