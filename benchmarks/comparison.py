"""The page of the comparison, and README's table of it, written from what was measured and seen."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.candidates import OURS, PYTHON_REDIS_LOCK, REDIS_PY
from benchmarks.libraries import HEIMDALL, HEIMDALL_AT_ONCE, ONCE, OURS_QUEUED, PLAIN_AGAIN, SINGLETON
from benchmarks.report import (
    MAIN,
    POOL,
    PROCESSOR,
    PUBLISHED,
    PUBLISHED_AND_RUN,
    PUBLISHER,
    RUN,
    SERVER,
    START,
    TASK_COMMANDS,
    TASK_MEMORY,
    TASK_TRIPS,
    text,
)

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "reference" / "comparison.md"
BEGIN, END = "<!-- written by `make compare` -->", "<!-- end of what `make compare` writes -->"

COLUMNS = (OURS, OURS_QUEUED, SINGLETON, ONCE, HEIMDALL)
HEADINGS = {OURS: "this library", OURS_QUEUED: "this library, `until_executed`"}

COSTS = {
    PUBLISHED_AND_RUN: "published and run, tasks/s",
    RUN: "run, tasks/s",
    PROCESSOR: "processor time of all processes",
    PUBLISHER: "µs above plain Celery's: the publisher",
    MAIN: "the worker's main process",
    POOL: "its pool processes",
    SERVER: "the server",
    PUBLISHED: "published, calls/s",
    START: "time from `delay` to the body",
    TASK_TRIPS: "round trips to Redis, in all",
    TASK_COMMANDS: "commands to Redis, in all",
    TASK_MEMORY: "bytes in Redis while it runs",
}
COUNTED = (TASK_TRIPS, TASK_COMMANDS, TASK_MEMORY)
ABOVE = (PUBLISHER, MAIN, POOL, SERVER)


def read(name: str) -> dict[str, Any]:
    """What is committed of one run."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


SEEN = (
    "The same scenarios, played with each library on real workers with real kills. The words are what was seen. "
    "Each library is set up as its documentation begins."
)
KILLED = (
    "In a queue mode, calls that a killed worker had received and not begun count as queued until the broker delivers "
    "them again: with Redis after the visibility timeout, which is an hour by default. Equal calls are not sent "
    "meanwhile, with each of these libraries; [how to shorten it]"
    "(../how-to/unique-in-the-queue.md#if-a-worker-is-killed)."
)
MEASURED = (
    "The cost of a lock for a task that does nothing, where it weighs most. All took turns in one run, on a worker "
    "with two pool processes. The values are shares and multiples of plain Celery's, with quartiles."
)

ALONE = (
    "`Lock` without a task, beside two other locks for Python. Without another unit, the values are multiples of a "
    "PING in the same run."
)
LOCKS = (OURS, REDIS_PY, PYTHON_REDIS_LOCK)

PICTURE = "Throughput, processor time and round trips, beside plain Celery"
IN_SHORT = {
    "worker killed": "the worker is killed: the same call can run",
    "retry at once": "`self.retry()`",
    "delivered twice": "a message is delivered twice: its bodies run",
    "chord": "a chord with a duplicate",
}
"""What the README has of the scenarios."""
RATE = "a task that does nothing: share of plain Celery's rate"
PROCESSORS = "and multiple of plain Celery's processor time"
SEEN_IN_SHORT = (
    "From real workers with real kills, and from one measurement in which all took turns. An empty task is where a "
    "lock weighs most. [More scenarios, and all costs](docs/reference/comparison.md)."
)


def section() -> str:
    """All of it, as Markdown."""
    scenarios, tasks = read("scenarios"), read("tasks")
    return "\n\n".join(
        [
            SEEN,
            _table([_heading("", scenarios), *(_scenario(each, scenarios) for each in scenarios["scenarios"])]),
            KILLED,
            MEASURED,
            f"![{PICTURE}](../costs.svg)",
            _table([_heading("", tasks), *(_cost(row, tasks) for row in tasks["rows"] if row["what"] in COSTS)]),
            ALONE,
            _locks(read("locks")["valkey"]["rows"]),
            _small_print(scenarios, tasks),
        ]
    )


def summary() -> str:
    """What the README has of it: a table, and the picture of the costs."""
    scenarios, tasks = read("scenarios"), read("tasks")
    costs = {row["what"]: row["values"] for row in tasks["rows"]}
    labels = [label for label in _columns(scenarios) if label != OURS_QUEUED]
    words = {each["name"]: each["verdicts"] for each in scenarios["scenarios"]}
    rows = [["", *(HEADINGS.get(label, label) for label in labels)]]
    rows += [[say, *(words[name][label]["word"] for label in labels)] for name, say in IN_SHORT.items()]
    for say, what in ((RATE, PUBLISHED_AND_RUN), (PROCESSORS, PROCESSOR)):
        rows.append([say, *(times(costs[what][label]["median"]) for label in labels)])
    return "\n\n".join([_table(rows), SEEN_IN_SHORT, f"![{PICTURE}](docs/costs.svg)"])


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
    everybody = [row for row in rows if set(LOCKS) <= set(row["values"])]
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
    if row["what"] in ABOVE:
        return f"{spread['median']:.0f}"
    return _range(spread)


def times(number: float) -> str:
    """A share or a multiple."""
    if number < 0.1:
        return f"{number:.1g}"
    return f"{number:.2f}" if number < 10 else text(number)


def _table(rows: Sequence[Sequence[str]]) -> str:
    heading, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *body))


def _small_print(scenarios: Mapping[str, Any], tasks: Mapping[str, Any]) -> str:
    run = next(row for row in tasks["rows"] if row["what"] == RUN)["values"]
    missing = "".join(
        f" {label} does not run with these versions: {why}." for label, why in scenarios["problems"].items()
    )
    again = _range(run[PLAIN_AGAIN])
    return (
        f"A second worker of plain Celery, in turn with the rest, ran {again} times as many tasks as the first, so "
        f"smaller differences mean nothing.{_without_waiting(run)} {_versions(scenarios, tasks)}.{missing} "
        "`make scenarios` and `make bench` do it again; details are in `benchmarks/results`."
    )


def _without_waiting(run: Mapping[str, Any]) -> str:
    if HEIMDALL_AT_ONCE not in run:
        return ""
    share = _range(run[HEIMDALL_AT_ONCE])
    return f" With its option `unique_lock_blocking` off, which is on by default, {HEIMDALL} ran {share}."


def _range(spread: Mapping[str, float]) -> str:
    return f"{times(spread['median'])} ({times(spread['low'])}-{times(spread['high'])})"


def _versions(scenarios: Mapping[str, Any], tasks: Mapping[str, Any]) -> str:
    names = ", ".join(f"{name} {version}" for name, version in tasks["versions"].items())
    dates = " and ".join(sorted({scenarios["date"], tasks["date"]}))
    return f"Seen on {dates} with Python {tasks['python']}, {names}, on {tasks['cores']} cores"
