"""The table on the screen, the JSON beside it, and whether the targets are met."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.candidates import OURS
from benchmarks.libraries import HEIMDALL, ONCE, ONCE_TASK, OURS_QUEUED, SINGLETON
from benchmarks.rounds import Spread

PAIR = "acquire + release"
CONFLICT = "conflict decided"
RENEWAL = "1,000 leases renewed"
SCRIPT = "longest script of a renewal"
TURN = "others wait for a renewal"
HAND_OFF = "hand-off to a waiter"
PAIR_SHARE = f"{PAIR}, beside redis-py"
CONFLICT_SHARE = f"{CONFLICT}, beside redis-py"
SERVER_PAIR = "processor time of the server for what a task sends"
SERVER_PAIR_INSTRUCTIONS = "instructions of the server for what a task sends"
PAIR_COMMANDS = "commands of acquire + release"
CONFLICT_COMMANDS = "commands of a conflict"
MEMORY = "memory of a held lock"

PUBLISHED = "calls published"
PUBLISHED_AND_RUN = "tasks published and run"
RUN = "tasks run"
PROCESSOR = "processor time of all processes"
PUBLISHER = "processor time of the publisher"
MAIN = "processor time of the worker's main process"
POOL = "processor time of its pool processes"
SERVER = "processor time of the server"
INSTRUCTIONS = "instructions of the worker"
MAIN_INSTRUCTIONS = "instructions of its main process"
CHILDREN_INSTRUCTIONS = "instructions of its pool processes"
SERVER_INSTRUCTIONS = "instructions of the server"
START = "from publishing to the body"
TASK_COMMANDS = "commands added to a task"
TASK_TRIPS = "round trips added to a task"
TASK_MEMORY = "memory while a task runs"

BASE = "the unit, in µs or thousands"
PEERS = (SINGLETON, ONCE, ONCE_TASK, HEIMDALL)


@dataclass(frozen=True, slots=True)
class Target:
    """The figure that ours has to reach, given the medians of all."""

    text: str
    met: Callable[[Mapping[str, float]], bool]


def _at_most(limit: float) -> Target:
    return Target(f"at most {limit:g}", lambda cost: cost[OURS] <= limit)


def pinned(what: str) -> str:
    """The name of *what* with a worker that has a core for itself."""
    return f"{what}, on a core of its own"


def _best(share: Mapping[str, float], limit: float) -> float:
    return max(limit, *(share.get(peer, 0) for peer in PEERS))


def _at_least(limit: float) -> Target:
    return Target(f"at least {limit:g}", lambda cost: cost[OURS] >= limit)


TARGETS = {
    PAIR: _at_most(1.9),
    PAIR_SHARE: _at_most(0.8),
    CONFLICT: _at_most(1.4),
    RENEWAL: _at_most(0.5),
    SCRIPT: _at_most(0.2),
    TURN: _at_most(0.2),
    HAND_OFF: _at_most(0.9),
    SERVER_PAIR: _at_most(8.5),
    SERVER_PAIR_INSTRUCTIONS: _at_most(110),
    PAIR_COMMANDS: _at_most(2),
    CONFLICT_COMMANDS: _at_most(1),
    MEMORY: _at_most(260),
    PUBLISHED_AND_RUN: Target("at least 0.88 and above every peer", lambda share: share[OURS] >= _best(share, 0.88)),
    pinned(RUN): _at_least(0.92),
    PROCESSOR: Target(
        "at most 1.15 and below every peer",
        lambda cost: cost[OURS] <= min(1.15, *(cost[peer] for peer in PEERS if peer in cost)),
    ),
    PUBLISHED: Target("until_executed: above every peer", lambda share: share[OURS_QUEUED] >= _best(share, 0.0)),
    TASK_TRIPS: _at_most(2),
    TASK_MEMORY: _at_most(256),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One cost, of all who have it, in one unit; *base* is what one of the unit, or nothing above it, costs."""

    what: str
    unit: str
    values: Mapping[str, Spread]
    base: Spread | None = None
    asked: str = ""
    """The name of its target, where that is another one than usual."""

    @property
    def name(self) -> str:
        """With its unit."""
        return f"{self.what}, {self.unit}" if self.unit else self.what

    @property
    def target(self) -> str:
        """The target of ours as text; empty without one."""
        return self._target.text if self._target else ""

    @property
    def met(self) -> bool | None:
        """By the medians."""
        if self._target is None:
            return None
        return self._target.met({who: spread.median for who, spread in self.values.items()})

    @property
    def _target(self) -> Target | None:
        return TARGETS.get(self.asked or self.what)


@dataclass(frozen=True, slots=True)
class Rows:
    """All that was measured in one place."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class ServerReport:
    """All rows of one server, and how many microseconds a PING takes there."""

    server: str
    version: str
    ping: Spread
    rows: Sequence[Row]

    @property
    def title(self) -> str:
        """Which server, and what the unit of many rows is there."""
        return f"{self.server} {self.version}, where a PING takes {text(self.ping.median)} µs"


def save(report: Mapping[str, Any], path: Path) -> None:
    """Write it as JSON, for a later comparison."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def by_server(reports: Sequence[ServerReport]) -> dict[str, Any]:
    """The part of the locks that is saved."""
    return {
        report.server: {
            "version": report.version,
            "ping_microseconds": asdict(report.ping),
            "rows": [plain(row) for row in report.rows],
        }
        for report in reports
    }


def plain(row: Row) -> dict[str, Any]:
    """The part of one row that is saved."""
    return {
        "what": row.what,
        "unit": row.unit,
        "base": asdict(row.base) if row.base else None,
        "target": row.target,
        "met": row.met,
        "values": {who: asdict(spread) for who, spread in row.values.items()},
    }


def show(tables: Sequence[Rows], notes: Sequence[str]) -> None:
    """On a screen, or in a file as wide as it must be."""
    console = Console(width=None if sys.stdout.isatty() else 240)
    for each in tables:
        console.print(table(each.title, each.rows, columns(each.rows)))
    console.print(*notes, sep="\n")


def columns(rows: Sequence[Row]) -> list[str]:
    """Everybody who has a number, in the order of appearance."""
    return list(dict.fromkeys(who for row in rows for who in row.values))


def table(title: str, rows: Sequence[Row], columns: Sequence[str]) -> Table:
    """The medians, and below each its quartiles."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    based = any(row.base for row in rows)
    for heading in ("", *([BASE] if based else []), *columns, "asked of ours", ""):
        shown.add_column(heading.replace("-", " "), overflow="fold")
    for row in rows:
        costs = [_cell(spread, "\n[dim]", "") for spread in _spreads(row, columns, based)]
        shown.add_row(row.name, *costs, row.target, {None: "", True: "met", False: "[bold red]missed"}[row.met])
    return shown


def markdown(title: str, rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as a table of Markdown, for narrow screens."""
    based = any(row.base for row in rows)
    heading = ["", *([BASE] if based else []), *columns, "asked of ours", ""]
    met = {None: "", True: "met", False: "missed"}
    body = [
        [row.name, *(_cell(spread, " (", ")") for spread in _spreads(row, columns, based)), row.target, met[row.met]]
        for row in rows
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *body)]
    return "\n".join([f"## {title}", "", *lines])


def save_markdown(tables: Sequence[Rows], notes: Sequence[str], path: Path) -> None:
    """All tables, and what is to be said below them."""
    shown = [markdown(each.title, each.rows, columns(each.rows)) for each in tables]
    path.write_text("\n\n".join([*shown, *notes]) + "\n", encoding="utf-8")


def _spreads(row: Row, columns: Sequence[str], based: bool) -> list[Spread | None]:
    return [*([row.base] if based else []), *(row.values.get(who) for who in columns)]


def _cell(spread: Spread | None, before: str, after: str) -> str:
    if spread is None:
        return ""
    if spread.low == spread.high:
        return text(spread.median)
    return f"{text(spread.median)}{before}{text(spread.low)}-{text(spread.high)}{after}"


def text(number: float) -> str:
    """To three digits."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
