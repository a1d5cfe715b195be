"""The benchmarks run, and those of their numbers hold that do not depend on the machine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.candidates import OURS, PYTHON_REDIS_LOCK, REDIS_PY
from benchmarks.report import (
    CONFLICT,
    CONFLICT_COMMANDS,
    HAND_OFF,
    MEMORY,
    PAIR,
    PAIR_COMMANDS,
    RENEWAL,
    SCRIPT,
    TURN,
)
from tests.servers import SERVERS

ROOT = Path(__file__).parents[2]
EVERYBODY = {OURS, REDIS_PY, PYTHON_REDIS_LOCK}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("benchmarks") / "locks.json"
    command = [sys.executable, "-m", "benchmarks.locks", "--quick", "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    return dict(json.loads(out.read_text()))


def test_every_server_there_is_has_every_row_with_sane_numbers(reports: dict[str, Any]) -> None:
    assert set(reports) == {kind for kind in SERVERS if kind != "redis" or shutil.which("redis-server")}
    for report in reports.values():
        rows = {row["what"]: row["values"] for row in report["rows"]}
        for what in (PAIR, CONFLICT, RENEWAL, HAND_OFF, PAIR_COMMANDS, CONFLICT_COMMANDS, MEMORY):
            assert set(rows.pop(what)) == EVERYBODY
        assert {SCRIPT} <= set(rows) <= {SCRIPT, TURN}
        spreads = [spread for row in report["rows"] for spread in row["values"].values()]
        for spread in [report["ping_microseconds"], *spreads]:
            assert 0 < spread["low"] <= spread["median"] <= spread["high"] < 1e6


@pytest.mark.parametrize(("what", "expected"), [(PAIR_COMMANDS, 2), (CONFLICT_COMMANDS, 1)])
def test_a_lock_takes_no_command_more_than_it_needs(reports: dict[str, Any], what: str, expected: int) -> None:
    assert {ours(report, what) for report in reports.values()} == {expected}


def test_a_held_lock_takes_at_most_400_bytes(reports: dict[str, Any]) -> None:
    assert all(ours(report, MEMORY) <= 400 for report in reports.values())


def ours(report: dict[str, Any], what: str) -> float:
    (row,) = [row for row in report["rows"] if row["what"] == what]
    return float(row["values"][OURS]["median"])
