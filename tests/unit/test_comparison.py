"""The comparison, and what README has of it, is what was measured and seen, to the letter."""

import re
from collections.abc import Callable

import pytest

from benchmarks import comparison, scale_page
from benchmarks.report import PROCESSOR, PUBLISHED_AND_RUN

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

    assert (found["leases"]["lost"], found["leases"]["sockets"]) == (0, 2)
    assert found["tasks"]["connections"]["pool process"] == 2


@pytest.mark.parametrize("what", [PUBLISHED_AND_RUN, PROCESSOR])
def test_the_chart_has_the_numbers_of_the_table(what: str) -> None:
    drawn = (comparison.ROOT / "docs" / "costs.svg").read_text(encoding="utf-8")
    (row,) = [row for row in comparison.read("tasks")["rows"] if row["what"] == what]
    medians = [comparison.times(row["values"][label]["median"]) for label in comparison.COLUMNS]

    assert [median for median in medians if not re.search(rf">\s*{re.escape(median)}\s*<", drawn)] == []
