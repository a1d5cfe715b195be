"""The benchmarks run, and those of their numbers hold that do not depend on the machine."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import progress
from benchmarks.candidates import OURS, PYTHON_REDIS_LOCK, REDIS_PY
from benchmarks.libraries import (
    FLOOR_NATIVE,
    FLOOR_PUBLISHED,
    FLOOR_SCRIPTS,
    HEIMDALL,
    HEIMDALL_AT_ONCE,
    LOCKING,
    OURS_QUEUED,
    PLAIN_AGAIN,
    usable,
)
from benchmarks.locks import SERVERS
from benchmarks.report import (
    CONFLICT,
    CONFLICT_COMMANDS,
    CONFLICT_SHARE,
    HAND_OFF,
    MEMORY,
    PAIR,
    PAIR_COMMANDS,
    PAIR_SHARE,
    RENEWAL,
    SCRIPT,
    SERVER_PAIR,
    SERVER_PAIR_INSTRUCTIONS,
    TASK_COMMANDS,
    TASK_MEMORY,
    TASK_TRIPS,
    TURN,
)
from benchmarks.rounds import AGAIN
from benchmarks.script_cost import EMPTY, SET_AND_DEL
from benchmarks.task_costs import EARLY

# Minutes, and of the machine as much as of us.
pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
FLOORS = {FLOOR_SCRIPTS, FLOOR_NATIVE, FLOOR_PUBLISHED}
EVERYBODY = {OURS, REDIS_PY, PYTHON_REDIS_LOCK}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, Any]:
    return measured("locks", folder)


@pytest.fixture(scope="module")
def tasks(folder: Path) -> dict[str, Any]:
    return measured("tasks", folder)


def measured(what: str, folder: Path) -> dict[str, Any]:
    out = folder / f"{what}.json"
    command = [sys.executable, "-m", f"benchmarks.{what}", "--quick", "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    return dict(json.loads(out.read_text()))


def test_every_server_there_is_has_every_row_with_sane_numbers(reports: dict[str, Any]) -> None:
    assert set(reports) == {kind for kind in SERVERS if kind != "redis" or shutil.which("redis-server")}
    for report in reports.values():
        rows = {row["what"]: row["values"] for row in report["rows"]}
        for what in (PAIR, CONFLICT, PAIR_COMMANDS, CONFLICT_COMMANDS, MEMORY):
            assert set(rows.pop(what)) == EVERYBODY
        for what in (PAIR_SHARE, CONFLICT_SHARE, RENEWAL, HAND_OFF):
            assert set(rows.pop(what)) == {*EVERYBODY, AGAIN}
        assert set(rows.pop(SERVER_PAIR)) == {OURS, AGAIN, SET_AND_DEL, EMPTY}
        rows.pop(SERVER_PAIR_INSTRUCTIONS, None)
        assert {SCRIPT} <= set(rows) <= {SCRIPT, TURN}
        spreads = [spread for row in report["rows"] for spread in row["values"].values()]
        for spread in [report["ping_microseconds"], *spreads]:
            assert 0 < spread["low"] <= spread["median"] <= spread["high"] < 1e6


@pytest.mark.parametrize(("what", "expected"), [(PAIR_COMMANDS, 2), (CONFLICT_COMMANDS, 1)])
def test_a_lock_takes_no_command_more_than_it_needs(reports: dict[str, Any], what: str, expected: int) -> None:
    assert {ours(report, what) for report in reports.values()} == {expected}


def test_a_held_lock_takes_at_most_400_bytes(reports: dict[str, Any]) -> None:
    assert all(ours(report, MEMORY) <= 400 for report in reports.values())


def test_every_library_there_is_has_every_row_of_the_tasks(tasks: dict[str, Any]) -> None:
    locking = {library.label for library in usable(LOCKING)}
    for row in tasks["rows"]:
        assert set(row["values"]) - {PLAIN_AGAIN, HEIMDALL_AT_ONCE, *FLOORS} == locking
        assert is_sane(row)


def test_each_place_is_told_with_and_without_acks_late_beside_the_noise_and_the_floors(tasks: dict[str, Any]) -> None:
    *timed, _, _ = tables = tasks["tables"]
    early, late = tables[::2], tables[1::2]
    assert [table["title"] for table in late] == [f"{table['title']}, acks_late" for table in early]
    # A task of celery-heimdall waits for long; that is told once.
    everybody = {library.label for library in usable(LOCKING)} - {HEIMDALL} | {PLAIN_AGAIN, *FLOORS}
    for table in timed:
        for row in table["rows"]:
            assert everybody <= set(row["values"])
            assert is_sane(row)
            assert row["base"]["median"] > 0
    assert [{EARLY in row["values"] for row in table["rows"]} for table in timed] == [{False}, {True}] * (
        len(timed) // 2
    )


def is_sane(row: dict[str, Any]) -> bool:
    """What is told above plain Celery's may be below it, in noise."""
    least = float("-inf") if "above plain" in row["unit"] else 0
    return all(least < spread["low"] <= spread["median"] <= spread["high"] for spread in row["values"].values())


def test_what_a_task_sends_costs_the_server_more_than_scripts_that_do_nothing(reports: dict[str, Any]) -> None:
    for report in reports.values():
        native, empty, scripts = (ours(report, SERVER_PAIR, label) for label in (SET_AND_DEL, EMPTY, OURS))
        assert 0.1 < native < empty < scripts < 1000


def test_the_tables_are_written_to_be_read_as_well(tasks: dict[str, Any], folder: Path) -> None:
    text = (folder / "tasks.md").read_text()
    for table in tasks["tables"]:
        assert f"## {table['title']}\n" in text
        assert all(f"| {row['what']}" in text for row in table["rows"])
    assert ("Instructions are not counted" in text) == bool(tasks["instructions"])


@pytest.mark.parametrize(("label", "trips"), [(OURS, 2), (OURS_QUEUED, 3)])
def test_a_lock_adds_two_round_trips_to_a_task_and_uniqueness_in_the_queue_one_more(
    tasks: dict[str, Any], label: str, trips: int
) -> None:
    assert ours(tasks, TASK_TRIPS, label) == trips
    assert ours(tasks, TASK_MEMORY, label) <= 400


def test_a_floor_sends_two_commands(tasks: dict[str, Any]) -> None:
    assert {ours(tasks, what, floor) for what in (TASK_TRIPS, TASK_COMMANDS) for floor in FLOORS} == {2}


def test_two_runs_are_told_beside_each_other_and_their_peers(
    reports: dict[str, Any], tasks: dict[str, Any], folder: Path
) -> None:
    page = progress.page(folder, folder)
    titles = [*(f"`Lock` at {server}" for server in reports), *(table["title"] for table in tasks["tables"])]
    assert re.findall("^## (.*)$", page, re.MULTILINE) == titles
    (line,) = re.findall(rf"^\| {re.escape(PAIR)}, PING .*$", page.partition("\n## ")[0], re.MULTILINE)
    _, _, now, reached, asked, *_ = line.split("|")
    assert now == reached
    assert asked.strip() == "at most 1.9"


def ours(report: dict[str, Any], what: str, label: str = OURS) -> float:
    (row,) = [row for row in report["rows"] if row["what"] == what]
    return float(row["values"][label]["median"])
