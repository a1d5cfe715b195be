"""`singleton watch`: the list of locks, again and again; or their changes, a line each."""

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

import click

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.operations.changes import changes, is_idle
from celery_singleton_lock.operations.inventory import Locks, in_order, rows_of
from celery_singleton_lock.operations.shell import Seconds, as_json, locks_of, told, write_json
from celery_singleton_lock.operations.words import table
from celery_singleton_lock.stores.inventory import Survey

_HOME, _TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command("watch")
@click.argument("pattern", required=False)
@click.option(
    "--interval",
    type=Seconds(min=0.1, max=3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait between two looks.",
)
@as_json
@click.pass_obj
def watch(obj: Any, pattern: str | None, interval: float, is_json: bool) -> None:
    """Show the list of locks, again and again, until Ctrl-C.

    With --json, or if its output is no terminal, it writes a line for each change
    instead. What changes back between two looks is not seen.

    PATTERN is a glob for lock names, such as 'shop.*'.
    """
    draws = sys.stdout.isatty() and not is_json
    with told():
        locks = locks_of(obj.app)
        known = _look(locks, pattern, {})
    before: Mapping[str, Survey] = {}
    try:
        while True:
            _draw(known) if draws else _tell(before, known)
            before = {key: survey for key, survey in known.items() if not is_idle(survey)}
            known = _look_later(locks, pattern, before, interval)
    except KeyboardInterrupt:
        pass


def _look(locks: Locks, pattern: str | None, before: Mapping[str, Survey]) -> dict[str, Survey]:
    """All present locks, and the changes of the former ones."""
    found = {survey.key: survey for survey in locks.surveys(pattern)}
    left = [key for key in before if key not in found]
    return found | {survey.key: survey for survey in locks.store.survey(left)}


def _look_later(locks: Locks, pattern: str | None, before: Mapping[str, Survey], interval: float) -> dict[str, Survey]:
    while True:
        time.sleep(interval)
        try:
            return _look(locks, pattern, before)
        except StoreError as error:
            # It may come back.
            click.echo(str(error), err=True)


def _tell(before: Mapping[str, Survey], after: Mapping[str, Survey]) -> None:
    for change in changes(before, after):
        write_json(change.as_json())


def _draw(known: Mapping[str, Survey]) -> None:
    columns, height = shutil.get_terminal_size()
    rows = in_order(row for survey in known.values() for row in rows_of(survey))
    lines = table(rows).splitlines() if rows else ["No locks."]
    if len(lines) >= height:
        lines = [*lines[: height - 2], f"... and {len(lines) - height + 2} more"]
    drawn = "".join(f"{line[:columns]}{_TO_END_OF_LINE}\n" for line in lines)
    click.echo(f"{_HOME}{drawn}{_TO_END_OF_SCREEN}", nl=False, color=True)
