"""The page: the held locks and the waiting calls, as HTML without a script. Every text from outside is escaped."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib import resources

from celery_singleton_lock.operations.inventory import Row
from celery_singleton_lock.operations.words import OF_ONE_PROCESS, duration, shown
from celery_singleton_lock.stores.base import lock_name_of
from celery_singleton_lock.web.totals import Total, totals_of

MOST_ROWS = 200
STYLE = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
STYLE_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
"""The digest by which the browser knows that the style is ours."""

SAID = {
    "asked": "Asked to end. It hears of it at its next renewal, within a third of its TTL, and is gone then.",
    "dropped": "The marks are gone.",
    "nothing": "Nothing was done: nobody was there any more.",
    "changed": "Nothing was done: somebody holds the lock now. Look again.",
}
"""The possible results of a break, by the word in the address."""

_ROW_HEAD = ("LOCK", "STATE", "TASK ID", "WORKER", "HELD", "LEFT", "WAITING")
_TOTAL_HEAD = ("TASK", "HELD", "WAITING", "QUEUED", "LONGEST HELD")


@dataclass(frozen=True)
class View:
    """The data for one request.

    Attributes:
        name: The name of the app.
        address: Where the locks are, without credentials.
        base: Where the page is mounted, without a slash at the end.
        rows: The rows that match the filter.
        pattern: The filter.
        refresh: Seconds until the browser asks again, if it shall.
        token: The token that a form has to send; None if nothing may be broken.
        said: The result of a break, one of `SAID`.
        problem: The reason why nothing is known.
        is_of_one_process: The locks are in memory, so those of other processes are not seen.
    """

    name: str
    address: str
    base: str = ""
    rows: Sequence[Row] = field(default=())
    pattern: str = ""
    refresh: int | None = None
    token: str | None = None
    said: str | None = None
    problem: str | None = None
    is_of_one_process: bool = False


def page(view: View) -> str:
    """The whole page."""
    refresh = f'<meta http-equiv="refresh" content="{view.refresh}">' if view.refresh else ""
    content = _away(view) if view.problem is not None else _found(view)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{refresh}<title>Locks of {_text(view.name)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>Locks of {_text(view.name)}</h1><p>{_text(view.address)} · "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC</p></header>{content}</main></body></html>"
    )


def _away(view: View) -> str:
    return f'<p class="said away">The store cannot be asked. {_text(view.problem or "")}</p>'


def _found(view: View) -> str:
    said = f'<p class="said" role="status">{SAID[view.said]}</p>' if view.said in SAID else ""
    alone = f'<p class="said">{OF_ONE_PROCESS}</p>' if view.is_of_one_process else ""
    totals = totals_of(view.rows)
    return f"{said}{alone}{_tiles(totals)}{_filter(view)}{_locks(view)}{_by_task(totals)}"


def _tiles(totals: Sequence[Total]) -> str:
    longest = max((total.longest for total in totals), default=0.0)
    tiles = {
        "Held": str(sum(total.held for total in totals)),
        "Waiting": str(sum(total.waiting for total in totals)),
        "Queued": str(sum(total.queued for total in totals)),
        "Longest held": duration(longest) if longest else "-",
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles.items())
    return f'<dl class="tiles">{cells}</dl>'


def _filter(view: View) -> str:
    again = f'<input type="hidden" name="refresh" value="{view.refresh}">' if view.refresh else ""
    return (
        f'<form class="filter" method="get" action="{_text(view.base)}/" role="search">'
        f'<input type="search" name="name" value="{_text(view.pattern)}" placeholder="Lock name, such as shop.*" '
        f'aria-label="Lock name">{again}<button>Filter</button>'
        f'<a href="{_text(view.base)}/locks.json">JSON</a><a href="{_text(view.base)}/metrics">Metrics</a></form>'
    )


def _locks(view: View) -> str:
    if not view.rows:
        said = "No lock matches." if view.pattern else "Nothing is held, and nothing is queued."
        return f'<h2>Locks</h2><p class="note">{said}</p>'
    head = (*_ROW_HEAD, "") if view.token else _ROW_HEAD
    held = {row.key for row in view.rows if row.state == "held"}
    rows = "".join(_row(view, row, has_holder=row.key in held) for row in view.rows[:MOST_ROWS])
    more = len(view.rows) - MOST_ROWS
    note = f'<p class="note">And {more} more; filter by name, or ask for JSON.</p>' if more > 0 else ""
    return f"<h2>Locks</h2>{_table(head, rows, numbers=3)}{note}"


def _row(view: View, row: Row, *, has_holder: bool) -> str:
    name = f'<strong>{_text(lock_name_of(row.key))}</strong><code class="key">{_text(row.key)}</code>'
    cells = [
        f'<td class="first">{name}</td>',
        f'<td data-label="State"><span class="state {row.state}">{row.state}</span></td>',
        f'<td data-label="Task id"><code class="whole">{_text(row.task_id or "-")}</code></td>',
        f'<td data-label="Worker"><code class="whole">{_text(row.worker or "-")}</code></td>',
        _number("Held", "-" if row.held is None else duration(row.held)),
        _number("Left", duration(row.expires_in)),
        _number("Waiting", str(row.waiters)),
    ]
    if view.token is not None:
        cells.append(f'<td class="act">{_breaking(view, row, has_holder=has_holder)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _breaking(view: View, row: Row, *, has_holder: bool) -> str:
    if row.state == "held":
        holder, word = row.task_id or row.worker, "Ask to stop"
        what = "Its body gets LockLost at its next renewal, and the run ends as REVOKED. It keeps the lock until then."
    elif not has_holder:
        holder, word = "", "Drop marks"
        what = "What calls have left here goes at once. A message that is in the broker runs all the same."
    else:
        return ""
    fields = {"token": view.token or "", "key": row.key, "holder": holder, "name": view.pattern}
    hidden = "".join(f'<input type="hidden" name="{name}" value="{_text(value)}">' for name, value in fields.items())
    return (
        f"<details><summary>{word}…</summary>"
        f'<form method="post" action="{_text(view.base)}/break">{hidden}<p>{what}</p>'
        f'<button class="stop">{word}</button></form></details>'
    )


def _by_task(totals: Sequence[Total]) -> str:
    if not totals:
        return ""
    rows = "".join(
        f'<tr><td class="first"><strong>{_text(total.name)}</strong></td>{_number("Held", str(total.held))}'
        f"{_number('Waiting', str(total.waiting))}{_number('Queued', str(total.queued))}"
        f"{_number('Longest held', duration(total.longest) if total.longest else '-')}</tr>"
        for total in totals
    )
    return f"<h2>By task</h2>{_table(_TOTAL_HEAD, rows, numbers=4)}"


def _table(head: Sequence[str], rows: str, *, numbers: int) -> str:
    """Of the columns with a name, the last ones are numbers."""
    last = len([name for name in head if name])
    cells = "".join(
        f'<th scope="col" class="number">{name}</th>'
        if last - numbers <= place < last
        else f'<th scope="col">{name}</th>'
        for place, name in enumerate(head)
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>"


def _number(label: str, value: str) -> str:
    return f'<td class="number" data-label="{label}">{_text(value)}</td>'


def _text(text: str) -> str:
    return escape(shown(text), quote=True)
