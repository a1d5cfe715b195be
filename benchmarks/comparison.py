"""The page of the comparison, and README's table of it, written from what was measured and seen."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.candidates import OURS, PYTHON_REDIS_LOCK, REDIS_PY
from benchmarks.instructions import PARTS
from benchmarks.libraries import HEIMDALL, HEIMDALL_AT_ONCE, OURS_QUEUED, PLAIN, PLAIN_AGAIN
from benchmarks.report import (
    HAND_OFF,
    MEMORY,
    PAIR_COMMANDS,
    PAIR_SHARE,
    PEERS,
    PUBLISHED_AND_RUN,
    RENEWAL,
    RUN,
    TASK_MEMORY,
    TASK_TRIPS,
    text,
)

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "reference" / "comparison.md"
BEGIN, END = "<!-- written by `make compare` -->", "<!-- end of what `make compare` writes -->"

HEADINGS = {OURS: "this library", OURS_QUEUED: "this library, `until_executed`"}

COSTS = {
    PUBLISHED_AND_RUN: "tasks/s, share of plain Celery's",
    TASK_TRIPS: "round trips to Redis",
    TASK_MEMORY: "bytes in Redis while it runs",
}
COUNTED = (TASK_TRIPS, TASK_MEMORY)
ADDED = "CPU instructions added to a task, in thousands"
LEFT_OUT = ("raises", "ignores", "hard limit", "retry later", "expired", "by name")
"""Scenarios of which the page says nothing, because another one says it."""


def read(name: str) -> dict[str, Any]:
    """The figures of one run, as they are committed."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def _is_measured(label: str) -> bool:
    return (
        label in read("instructions")["thousands"]
        and all(label in each["verdicts"] for each in read("scenarios")["scenarios"])
        and all(label in each["values"] for each in read("tasks")["rows"] if each["what"] == PUBLISHED_AND_RUN)
    )


COLUMNS = tuple(label for label in (OURS, OURS_QUEUED, *PEERS) if _is_measured(label))
"""One that has joined since the last run has a column after the next one."""

SEEN = (
    "The same scenarios, played with each library on real workers with real kills. Each is set up as its "
    "documentation begins."
)
KILLED = (
    "In a queue mode, [calls that a killed worker had received]"
    "(../how-to/unique-in-the-queue.md#if-a-worker-is-killed) count as queued for a while."
)
MEASURED = (
    "The cost for a task that does nothing. Instructions are counted in user space by valgrind, and repeat within "
    "two percent. Rates are of one run in which all took turns, with quartiles; with neighbours they move by a tenth."
)

BURST = (
    "Serial work by key: bursts of calls of 0.1 s, published key by key, to four pool processes. Plain Celery excludes "
    "nothing. On an idle machine; where the processes wait for cores, `reschedule` takes up to three times as long as "
    "plain Celery."
)
# Written by hand: from a script that does what `benchmarks.bursts` does, on a machine on which nothing else ran.
BURST_ROWS = (
    ("", "this library, `reschedule`", "plain Celery"),
    ("10 keys with 20 calls each: time, beside plain Celery's", "1.09-1.13", "1"),
    ("of these, begun before the call that was published before them", "1 of 190", "26 and 36 of 190"),
    ("one key with 60 calls: time, beside the sum of its bodies", "1.12", "runs four at once"),
)
BURST_DATE = "2026-11-26"

ALONE = "`Lock` without a task, beside two other locks for Python."
ROWS_ALONE = (PAIR_SHARE, PAIR_COMMANDS, RENEWAL, HAND_OFF, MEMORY)
LOCKS = (OURS, REDIS_PY, PYTHON_REDIS_LOCK)

PICTURE = "Instructions, rate and round trips, beside plain Celery"
IN_SHORT = {
    "worker killed": "the worker is killed: the same call can run",
    "retry at once": "`self.retry()`",
    "delivered twice": "a message is delivered twice: its bodies run",
    "chord": "a chord with a duplicate",
}
"""What the README has of the scenarios."""
RATE = "a task that does nothing: share of plain Celery's rate"
SEEN_IN_SHORT = (
    "Played on real workers with real kills. Instructions hardly vary between runs; rates do, so quartiles are given. "
    "[More scenarios, and all costs](docs/reference/comparison.md)."
)


def section() -> str:
    """All of it, as Markdown."""
    scenarios, tasks = read("scenarios"), read("tasks")
    stories = [each for each in scenarios["scenarios"] if each["name"] not in LEFT_OUT]
    return "\n\n".join(
        [
            SEEN,
            _table([_heading("", scenarios), *(_scenario(each, scenarios) for each in stories)]),
            KILLED,
            MEASURED,
            f"![{PICTURE}](../costs.svg)",
            _table(
                [
                    _heading("", tasks),
                    _added(tasks),
                    *(_added(tasks, part) for part in PARTS),
                    *(_cost(row, tasks) for row in tasks["rows"] if row["what"] in COSTS),
                ]
            ),
            BURST,
            _table(BURST_ROWS),
            ALONE,
            _locks(read("locks")["valkey"]["rows"]),
            _small_print(scenarios, tasks),
        ]
    )


def summary() -> str:
    """The README's part: a table, and the picture of the costs."""
    scenarios, tasks = read("scenarios"), read("tasks")
    (rate,) = [row["values"] for row in tasks["rows"] if row["what"] == PUBLISHED_AND_RUN]
    labels = [label for label in _columns(scenarios) if label != OURS_QUEUED]
    words = {each["name"]: each["verdicts"] for each in scenarios["scenarios"]}
    rows = [["", *(HEADINGS.get(label, label) for label in labels)]]
    rows += [[say, *(words[name][label]["word"] for label in labels)] for name, say in IN_SHORT.items()]
    rows.append([ADDED, *(thousands(added(label)) for label in labels)])
    rows.append([RATE, *(_range(rate[label]) for label in labels)])
    return "\n\n".join([_table(rows), SEEN_IN_SHORT])


def added(label: str, *parts: str) -> float:
    """Thousands of instructions that a library adds to a task of plain Celery, in these parts of its way or in all."""
    counted = read("instructions")["thousands"]
    return sum(float(counted[label][part]) - float(counted[PLAIN][part]) for part in parts or PARTS)


def thousands(number: float) -> str:
    """Without what differs from run to run."""
    return f"{max(0, number):,.0f}"


def _added(found: Mapping[str, Any], *parts: str) -> list[str]:
    say = f"of these in the {parts[0]}" if parts else ADDED
    return [say, *(thousands(added(label, *parts)) for label in _columns(found))]


def in_page(page: str) -> str:
    """The page with the comparison as it should be."""
    return _between(page, section())


def in_readme(readme: str) -> str:
    """The README with its table of the comparison as it should be."""
    return _between(readme, summary())


def _between(text: str, written: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{written}\n\n{END}{after}"


def _columns(found: Mapping[str, Any]) -> list[str]:
    return [label for label in COLUMNS if label not in found["problems"]]


def _heading(first: str, found: Mapping[str, Any]) -> list[str]:
    return [first, *(HEADINGS.get(label, label) for label in _columns(found))]


def _scenario(scenario: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [scenario["story"], *(scenario["verdicts"][label]["word"] for label in _columns(found))]


def _cost(row: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [COSTS[row["what"]], *(_spread(row, row["values"][label]) for label in _columns(found))]


def _locks(rows: Sequence[Mapping[str, Any]]) -> str:
    everybody = [row for row in rows if row["what"] in ROWS_ALONE and set(LOCKS) <= set(row["values"])]
    heading = ["", *(HEADINGS.get(label, label) for label in LOCKS)]
    return _table([heading, *([_named(row), *(_told(row, label) for label in LOCKS)] for row in everybody)])


def _named(row: Mapping[str, Any]) -> str:
    return str(row["what"]) if row["unit"] in ("", "PING") else f"{row['what']}, {row['unit']}"


def _told(row: Mapping[str, Any], label: str) -> str:
    spread = row["values"][label]
    return text(spread["median"]) if spread["low"] == spread["high"] else _range(spread)


def _spread(row: Mapping[str, Any], spread: Mapping[str, float]) -> str:
    if row["what"] in COUNTED:
        return text(spread["median"])
    return _range(spread)


def times(number: float) -> str:
    """A share or a multiple."""
    if number < 0.1:
        return f"{number:.1g}"
    return f"{number:.2f}" if number < 10 else text(number)


def _table(rows: Sequence[Sequence[str]]) -> str:
    heading, *body = rows
    head, *lines = [f"| {' | '.join(row)} |" for row in (heading, *body)]
    return "\n".join([head, f"|{'-|' * len(heading)}", *lines])


def _small_print(scenarios: Mapping[str, Any], tasks: Mapping[str, Any]) -> str:
    run = next(row for row in tasks["rows"] if row["what"] == RUN)["values"]
    missing = "".join(
        f" {label} does not run with these versions: {why}." for label, why in scenarios["problems"].items()
    )
    return (
        f"A second worker of plain Celery ran {_range(run[PLAIN_AGAIN])} of the first."
        f"{_without_waiting(run)} {_versions(scenarios, tasks)}.{missing} "
        "`make scenarios` and `make bench` do it again."
    )


def _without_waiting(run: Mapping[str, Any]) -> str:
    if HEIMDALL_AT_ONCE not in run:
        return ""
    return f" With `unique_lock_blocking` off, {HEIMDALL} ran {_range(run[HEIMDALL_AT_ONCE])}."


def _range(spread: Mapping[str, float]) -> str:
    return f"{times(spread['median'])} ({times(spread['low'])}-{times(spread['high'])})"


def _versions(scenarios: Mapping[str, Any], tasks: Mapping[str, Any]) -> str:
    names = ", ".join(f"{name} {version}" for name, version in tasks["versions"].items())
    dates = (
        f"Scenarios are of {scenarios['date']}, instructions of {read('instructions')['date']}, "
        f"rates of {tasks['date']}, bursts of {BURST_DATE}"
    )
    return f"{dates}. Versions: Python {tasks['python']}, {names}, on {tasks['cores']} cores"
