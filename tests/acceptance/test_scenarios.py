"""The scenarios see what there is to see, of a library that loses a retry and of one that does not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.libraries import OURS_QUEUED, SINGLETON, named
from benchmarks.scenarios import NOT_SEEN
from tests.servers import missing

# Minutes, and of the machine as much as of us.
pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if named(SINGLETON).problem:
        missing(f"{SINGLETON} is not installed")
    out = tmp_path_factory.mktemp("scenarios") / "scenarios.json"
    chosen = ["--scenario=raises", "--scenario=retry at once", f"--library={OURS_QUEUED}", f"--library={SINGLETON}"]
    command = [sys.executable, "-m", "benchmarks.scenarios", *chosen, "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
    found = json.loads(out.read_text())
    return {scenario["name"]: scenario["verdicts"] for scenario in found["scenarios"]}


def test_a_call_that_has_raised_runs_again_with_both(seen: dict[str, Any]) -> None:
    assert {label: verdict["word"] for label, verdict in seen["raises"].items()} == {
        OURS_QUEUED: "at once",
        SINGLETON: "at once",
    }


def test_the_retry_runs_with_one_and_is_lost_with_the_other(seen: dict[str, Any]) -> None:
    assert seen["retry at once"][OURS_QUEUED]["word"] == "runs"
    assert seen["retry at once"][SINGLETON]["word"] == "is lost"


def test_a_scenario_that_cannot_be_played_is_no_verdict(seen: dict[str, Any]) -> None:
    assert NOT_SEEN not in [verdict["word"] for verdicts in seen.values() for verdict in verdicts.values()]
