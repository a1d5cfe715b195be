"""docs/endings.md, written from what the tests have found."""

from pathlib import Path

from tests.endings.cases import BOUNDS, COLUMNS, ENDINGS, SHORT

PATH = Path(__file__).parents[2] / "docs" / "endings.md"

_HEAD = f"""# How a run can end

However a run ends, its key comes free, nobody else has run meanwhile, nothing renews the
lease afterwards, and the next call runs. Each cell below was found on a real worker by
`tests/endings`, which also writes this table (`make endings WRITE_DOCS=1 ARGS=-n0`).

* *at once*: the process that runs the body releases the key when the body ends.
* *within seconds*: {BOUNDS["within seconds"]:.0f} s at most, whatever the ttl (the test's is 60 s). The process
  that ran the body is dead; the main process of the worker notices, and releases the key for it.
* *within the ttl*: nobody is left to release it, so the lease ends by itself, one
  `lock_ttl` after the last renewal (30 s by default, {SHORT:.0f} s in the test).

Anything else says why there is nothing to promise.
"""


def text() -> str:
    """The page."""
    rows = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for ending in ENDINGS:
        cells = [ending.cell(column) for column in COLUMNS]
        rows.append([ending.name, *(cell if cell in BOUNDS else f"— ({cell})" for cell in cells)])
    return _HEAD + "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
