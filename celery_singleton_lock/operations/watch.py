"""The list of locks, again and again."""

import json
import shutil
import sys
import time
from collections.abc import Sequence

import click

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.operations.rows import Locks, Row, table

_HOME, _TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(locks: Locks, pattern: str | None, interval: float, *, is_json: bool) -> None:
    """Show the locks until Ctrl-C: as a list on a terminal, elsewhere as a line of JSON each time.

    Raises:
        StoreError: No answer to the first look; later ones are repeated.
    """
    show = _draw if sys.stdout.isatty() and not is_json else _write
    show(locks.rows(locks.surveys(pattern)))
    try:
        while True:
            time.sleep(interval)
            try:
                show(locks.rows(locks.surveys(pattern)))
            except StoreError as error:
                # It may come back.
                click.echo(str(error), err=True)
    except KeyboardInterrupt:
        pass


def _write(rows: Sequence[Row]) -> None:
    click.echo(json.dumps([row.as_json() for row in rows]))


def _draw(rows: Sequence[Row]) -> None:
    columns, height = shutil.get_terminal_size()
    lines = table(rows).splitlines() if rows else ["No locks."]
    if len(lines) >= height:
        lines = [*lines[: height - 2], f"... and {len(lines) - height + 2} more"]
    drawn = "".join(f"{line[:columns]}{_TO_END_OF_LINE}\n" for line in lines)
    click.echo(f"{_HOME}{drawn}{_TO_END_OF_SCREEN}", nl=False, color=True)
