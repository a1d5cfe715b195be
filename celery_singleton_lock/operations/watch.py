"""The list of locks, again and again; or the changes between two looks at it, a line each."""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import click

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.operations.rows import Locks, in_order, rows_of, table
from celery_singleton_lock.stores.records import LockState

_HOME, _TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(locks: Locks, pattern: str | None, interval: float, *, is_json: bool) -> None:
    """Show the locks until Ctrl-C: their list on a terminal, their changes elsewhere.

    Raises:
        StoreError: No answer to the first look; later ones are repeated.
    """
    draws = sys.stdout.isatty() and not is_json
    before: dict[str, LockState] = {}
    known = _look(locks, pattern, before)
    try:
        while True:
            if draws:
                _draw(known)
            else:
                found = (each for key in known for each in _changes(before.get(key, LockState(key)), known[key]))
                for change in sorted(found, key=lambda change: change["at"]):
                    click.echo(json.dumps(change, default=datetime.isoformat))
            before = {key: survey for key, survey in known.items() if rows_of(survey)}
            time.sleep(interval)
            try:
                known = _look(locks, pattern, before)
            except StoreError as error:
                # It may come back.
                click.echo(str(error), err=True)
    except KeyboardInterrupt:
        pass


def _look(locks: Locks, pattern: str | None, before: Mapping[str, LockState]) -> dict[str, LockState]:
    """All present locks, and the changes of the former ones."""
    found = {survey.key: survey for survey in locks.surveys(pattern)}
    left = [key for key in before if key not in found]
    return found | {survey.key: survey for survey in locks.surveys_of(left)}


def _draw(known: Mapping[str, LockState]) -> None:
    columns, height = shutil.get_terminal_size()
    rows = in_order(row for survey in known.values() for row in rows_of(survey))
    lines = table(rows).splitlines() if rows else ["No locks."]
    if len(lines) >= height:
        lines = [*lines[: height - 2], f"... and {len(lines) - height + 2} more"]
    drawn = "".join(f"{line[:columns]}{_TO_END_OF_LINE}\n" for line in lines)
    click.echo(f"{_HOME}{drawn}{_TO_END_OF_SCREEN}", nl=False, color=True)


def _changes(before: LockState, after: LockState) -> Iterator[dict[str, Any]]:
    held, holds = ({each.token: each for each in survey.leases} for survey in (before, after))
    gone = [holder for token, holder in held.items() if token not in holds]
    come = [holder for token, holder in holds.items() if token not in held]
    seen_at = _moment(after)

    def change(at: datetime, event: str, task_id: str | None, hostname: str | None = None) -> dict[str, Any]:
        return {"at": at, "event": event, "key": after.key, "task_id": task_id, "hostname": hostname}

    for each in gone:
        yield change(min((heir.acquired_at for heir in come), default=seen_at), "released", each.task_id, each.hostname)
    for each in come:
        yield change(each.acquired_at, "acquired", each.task_id, each.hostname)
    known = {(mark.state, mark.task_id) for mark in before.marks}
    for mark in after.marks:
        if mark.state != "quiet" and (mark.state, mark.task_id) not in known:
            yield change(seen_at, "waiting", mark.task_id)
    if after.problem and not before.problem:
        yield change(seen_at, "unreadable", None)
    for _ in range(after.waiters - before.waiters):
        yield change(seen_at, "waiting", None)


def _moment(survey: LockState) -> datetime:
    return datetime.fromtimestamp(survey.at / 1_000_000, UTC)
