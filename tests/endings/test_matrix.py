"""P1 and P2: however a run ends, on whichever pool, its key comes free and nobody overlaps."""

import os

import pytest

from tests.endings import table
from tests.endings.cases import BOUNDS, COLUMNS, ENDINGS, Ending
from tests.endings.stage import Outcome, Stage
from tests.servers import Server

CELLS = [(column, ending) for column in COLUMNS for ending in ENDINGS if ending.cell(column) in BOUNDS]
kept: set[tuple[str, str]] = set()


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, valkey_process: Server) -> dict[str, Outcome]:
    with Stage(request.param, valkey_process) as stage:
        return stage.play_all()


@pytest.mark.parametrize(
    ("found", "ending", "column"),
    # One process plays a pool, because all its endings are played at once.
    [pytest.param(column, ending, column, marks=pytest.mark.xdist_group(column)) for column, ending in CELLS],
    ids=[f"{column}: {ending.name}" for column, ending in CELLS],
    indirect=["found"],
    scope="module",
)
def test_the_key_comes_free_and_nobody_overlaps(found: dict[str, Outcome], ending: Ending, column: str) -> None:
    outcome = found[ending.name]

    assert outcome.freed_after < BOUNDS[ending.cell(column)]
    assert outcome.overlaps == []
    assert outcome.renewed_after_release == []
    assert outcome.next_ran
    assert outcome.without_expiry == []
    kept.add((column, ending.name))


def test_the_table_in_the_documentation_is_what_was_found() -> None:
    if kept != {(column, ending.name) for column, ending in CELLS}:
        pytest.skip("not all of it was found, or looked for")
    if os.environ.get("WRITE_DOCS"):
        table.PATH.write_text(table.text(), encoding="utf-8")
    assert table.PATH.read_text(encoding="utf-8") == table.text()
