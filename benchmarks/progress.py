"""Two runs beside each other, and what is asked: `python -m benchmarks.progress BEFORE AFTER`, two folders of results.

Ours before and after, its peers and the floor as they were in the later run, and how far two equal things were apart
in it. With one folder, what is reached is left empty.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.candidates import OURS, PYTHON_REDIS_LOCK, REDIS_PY
from benchmarks.libraries import FLOORS, ONCE, OURS_QUEUED, PLAIN_AGAIN, SINGLETON
from benchmarks.report import text
from benchmarks.rounds import AGAIN
from benchmarks.script_cost import EMPTY, SET_AND_DEL

OF_LOCKS = (REDIS_PY, PYTHON_REDIS_LOCK, SET_AND_DEL, EMPTY, AGAIN)
OF_TASKS = (SINGLETON, ONCE, *(floor.label for floor in FLOORS), PLAIN_AGAIN)

Found = Mapping[str, Any]


def page(before: Path, after: Path | None) -> str:
    """Markdown."""
    found = [dict(tables(folder)) for folder in (before, after) if folder]
    return "\n\n".join(f"## {title}\n\n{_table([each.get(title, []) for each in found])}" for title in found[-1])


def tables(folder: Path) -> Iterator[tuple[str, Sequence[Found]]]:
    """All that was saved there, by title."""
    for server, found in _read(folder / "locks.json").items():
        yield f"`Lock` at {server}", found["rows"]
    for table in _read(folder / "tasks.json").get("tables", []):
        yield table["title"], table["rows"]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _table(runs: Sequence[Sequence[Found]]) -> str:
    *_, latest = runs
    others = OF_TASKS if any(SINGLETON in row["values"] for row in latest) else OF_LOCKS
    heading = ["", "now", "reached", "asked", *others]
    body = [
        [
            f"{_name(row)}{'' if label == OURS else ', until_executed'}",
            *_now_and_reached(runs, row, label),
            _asked(row, label),
            *(_told(row, other) for other in others),
        ]
        for row in latest
        for label in (OURS, OURS_QUEUED)
        if label in row["values"]
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *body))


def _now_and_reached(runs: Sequence[Sequence[Found]], row: Found, label: str) -> list[str]:
    told = [
        next((_told(each, label) for each in run if (each["what"], each["unit"]) == (row["what"], row["unit"])), "")
        for run in runs
    ]
    return [*told, ""][:2]


def _asked(row: Found, label: str) -> str:
    text: str = row["target"]
    return text if text.startswith("until_executed") == (label == OURS_QUEUED) else ""


def _name(row: Found) -> str:
    return f"{row['what']}, {row['unit']}" if row["unit"] else str(row["what"])


def _told(row: Found, label: str) -> str:
    if label not in row["values"]:
        return ""
    low, median, high = (text(row["values"][label][name]) for name in ("low", "median", "high"))
    return median if low == high else f"{median} ({low}-{high})"


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.progress", description=__doc__)
    parser.add_argument("before", type=Path, help="as RESULTS of `make bench`")
    parser.add_argument("after", type=Path, nargs="?", help="another one, measured later")
    arguments = parser.parse_args()
    print(page(arguments.before, arguments.after))  # noqa: T201 (that is what it is for)


if __name__ == "__main__":
    main()
