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

PUBLISHED = "calls published"
PUBLISHED_AND_RUN = "tasks published and run"
RUN = "tasks run"
PROCESSOR = "processor time of the worker"
START = "from publishing to the body"
TASK_COMMANDS = "commands added to a task"
TASK_TRIPS = "round trips added to a task"
TASK_MEMORY = "memory while a task runs"


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of ours, given the medians of all."""

    text: str
    met: Callable[[Mapping[str, float]], bool]


def _at_most(limit: float) -> Target:
    return Target(f"at most {limit:g}", lambda cost: cost[OURS] <= limit)


def _at_least(limit: float) -> Target:
    return Target(f"at least {limit:g}", lambda cost: cost[OURS] >= limit)


TARGETS = {
    PAIR: Target("at most 2.3 and redis-py's", lambda cost: cost[OURS] <= min(2.3, cost[REDIS_PY])),
    CONFLICT: _at_most(1.4),
    RENEWAL: _at_most(25),
    SCRIPT: _at_most(0.2),
    TURN: _at_most(0.2),
    HAND_OFF: Target("at most 12 or python-redis-lock's", lambda cost: cost[OURS] <= max(12, cost[PYTHON_REDIS_LOCK])),
    PAIR_COMMANDS: _at_most(2),
    CONFLICT_COMMANDS: _at_most(1),
    MEMORY: _at_most(400),
    RUN: _at_least(0.95),
    TASK_TRIPS: _at_most(2),
    TASK_MEMORY: _at_most(400),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One cost, of all who have it, in one unit."""

    what: str
    unit: str
    values: Mapping[str, Spread]

    @property
    def target(self) -> str:
        """What is asked of ours, if anything is."""
        return TARGETS[self.what].text if self.what in TARGETS else ""

    @property
    def met(self) -> bool | None:
        """By the medians."""
        if self.what not in TARGETS:
            return None
        return TARGETS[self.what].met({who: spread.median for who, spread in self.values.items()})


@dataclass(frozen=True, slots=True)
class ServerReport:
    """All rows of one server, and how many microseconds a PING takes there."""

    server: str
    version: str
    ping: Spread
    rows: Sequence[Row]


def save(report: Mapping[str, Any], path: Path) -> None:
    """Write it as JSON, for a later comparison."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def by_server(reports: Sequence[ServerReport]) -> dict[str, Any]:
    """What is saved of the locks."""
    return {
        report.server: {
            "version": report.version,
            "ping_microseconds": asdict(report.ping),
            "rows": [plain(row) for row in report.rows],
        }
        for report in reports
    }


def plain(row: Row) -> dict[str, Any]:
    """What is saved of one row."""
    return {
        "what": row.what,
        "unit": row.unit,
        "target": row.target,
        "met": row.met,
        "values": {who: asdict(spread) for who, spread in row.values.items()},
    }


def show(report: ServerReport, console: Console) -> None:
    """One table per server."""
    title = f"{report.server} {report.version}, where a PING takes {text(report.ping.median)} µs"
    console.print(table(title, report.rows, (OURS, REDIS_PY, PYTHON_REDIS_LOCK)))


def table(title: str, rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """The medians, and below each its quartiles."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", *columns, "asked of ours", ""):
        shown.add_column(heading.replace("-", " "), overflow="fold")
    for row in rows:
        what = f"{row.what}, {row.unit}" if row.unit else row.what
        costs = [_cell(row.values.get(who)) for who in columns]
        shown.add_row(what, *costs, row.target, {None: "", True: "met", False: "[bold red]missed"}[row.met])
    return shown


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.low == spread.high:
        return text(spread.median)
    return f"{text(spread.median)}\n[dim]{text(spread.low)}-{text(spread.high)}"


def text(number: float) -> str:
    """To three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
