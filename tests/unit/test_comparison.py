"""The comparison, and what README has of it, is what was measured and seen, to the letter."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks import comparison, scale_page
from benchmarks.candidates import OURS
from benchmarks.report import PEERS, PUBLISHED_AND_RUN

README = (comparison.ROOT / "README.md").read_text(encoding="utf-8")
PAGE = comparison.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("text", "written"), [(README, comparison.in_readme), (PAGE, comparison.in_page)])
def test_it_is_what_the_results_say(text: str, written: Callable[[str], str]) -> None:
    assert text.count(comparison.BEGIN) == text.count(comparison.END) == 1
    assert written(text) == text, "run `make compare`"


def test_the_page_about_scale_is_what_the_results_say() -> None:
    page = (comparison.ROOT / "docs" / scale_page.PAGE).read_text(encoding="utf-8")

    assert scale_page.in_page(page, comparison.read("scale")) == page, "run `make compare`"


def test_what_is_promised_of_scale_was_seen() -> None:
    found = comparison.read("scale")

    assert found["leases"]["lost"] == 0
    # One for each thread that asks: the test's, the heartbeat, and whoever counts.
    assert found["leases"]["sockets"] <= 2
    plain, locked, requeued = (found["connections"][kind] for kind in ("plain", "singleton", "reschedule"))
    assert all("broker" not in each["pool process"] for each in (plain, locked)), "it publishes nothing"
    assert sum(locked["in all"].values()) - sum(plain["in all"].values()) <= 16
    assert requeued["in all"]["store"] <= 16


def test_the_chart_has_the_numbers_of_the_table() -> None:
    drawn = (comparison.ROOT / "docs" / "costs.svg").read_text(encoding="utf-8")
    (row,) = [row for row in comparison.read("tasks")["rows"] if row["what"] == PUBLISHED_AND_RUN]
    told = [comparison.times(row["values"][label]["median"]) for label in comparison.COLUMNS]
    told += [comparison.thousands(comparison.added(label)) for label in comparison.COLUMNS]

    assert [number for number in told if not re.search(rf">\s*{re.escape(number)}\s*<", drawn)] == []


def test_a_lock_costs_less_than_that_of_any_other_library() -> None:
    ours, *peers = (
        comparison.added(label) for label in (OURS, *(peer for peer in PEERS if peer in comparison.COLUMNS))
    )

    assert ours < min(peers)


def test_a_machine_without_valgrind_is_told_in_a_line_what_to_install() -> None:
    command = [sys.executable, "-m", "benchmarks.instructions"]
    ran = subprocess.run(command, cwd=comparison.ROOT, env={**os.environ, "PATH": ""}, capture_output=True, text=True)

    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "apt-get install valgrind" in ran.stderr
