"""The ledger is up to date: `make combinations ARGS=--ledger` plays it."""

import pytest

from tests.combinations import checker
from tests.combinations.found import FOUND
from tests.combinations.ledger import LEDGER, PACKAGE, ROOT, Entry, taken_out

RULES = {rule.__name__.replace("_", " ") for rule in checker.RULES}


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.finding)
def test_every_entry_finds_its_mend_its_program_and_its_rule(entry: Entry) -> None:
    text = (ROOT / PACKAGE / entry.file).read_text(encoding="utf-8")

    assert taken_out(entry, text) != text
    assert entry.program in FOUND
    assert entry.rule in RULES


def test_fifteen_findings_of_the_review_are_in_it() -> None:
    assert len({entry.finding.split()[0] for entry in LEDGER if entry.finding.startswith("Q")}) >= 15
