"""docs/reference/endings.md, written from what the tests have found."""

from pathlib import Path

from tests.endings.cases import BOUNDS, COLUMNS, ENDINGS

PATH = Path(__file__).parents[2] / "docs" / "reference" / "endings.md"

_HEAD = f"""# How a run can end

However a run ends, its key comes free, and the next call runs. No other run begins before that, and nothing renews the
lease afterwards. Each cell was found on a real worker by `tests/endings` (`make endings WRITE_DOCS=1 ARGS=-n0`).

* *at once*: the process that runs the body releases the key when the body ends.
* *within seconds*: that process is dead. The main process of the worker notices, and releases the key within
  {BOUNDS["within seconds"]:.0f} s, whatever the ttl.
* *within the ttl*: nobody is left to release the key. The lease ends one `lock_ttl` after the last renewal.
"""


def text() -> str:
    notes: dict[str, str] = {}
    alike: dict[tuple[str, ...], list[str]] = {}
    for ending in ENDINGS:
        cells = [ending.cell(column) for column in COLUMNS]
        for cell in cells:
            if cell not in BOUNDS:
                notes.setdefault(cell, f"—{chr(ord('a') + len(notes))}")
        alike.setdefault(tuple(notes.get(cell, cell) for cell in cells), []).append(ending.name)
    # Pools on which all is the same have one column.
    columns: dict[tuple[str, ...], list[str]] = {}
    for name, cells in zip(COLUMNS, zip(*alike, strict=True), strict=True):
        columns.setdefault(cells, []).append(name)
    heads = ["; ".join(names) for names in columns.values()]
    body = [["; ".join(names), *cells] for names, cells in zip(alike.values(), zip(*columns, strict=True), strict=True)]
    head, *rows = [f"| {' | '.join(row)} |" for row in (["", *heads], *body)]
    table = "\n".join([head, f"|{'-|' * (len(heads) + 1)}", *rows])
    return f"{_HEAD}\n{table}\n\n" + "".join(f"* {letter}: {why}.\n" for why, letter in notes.items())
