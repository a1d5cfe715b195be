"""The list of locks, again and again; or the changes between two looks at it, a line each."""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import click

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.operations.inventory import Locks, in_order, rows_of, table
from celery_singleton_lock.stores.inventory import LockState
from celery_singleton_lock.stores.records import Holder

Event = Literal["acquired", "released", "expired", "taken_over", "waiting"]
_HOME, _TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(locks: Locks, pattern: str | None, interval: float, *, is_json: bool) -> None:
    """Show the locks until Ctrl-C: their list on a terminal, their changes elsewhere.

    Raises:
        StoreError: No answer to the first look; later ones are repeated.
    """
    draws = sys.stdout.isatty() and not is_json
    known = _look(locks, pattern, {})
    before: Mapping[str, LockState] = {}
    try:
        while True:
            if draws:
                _draw(known)
            else:
                for change in changes(before, known):
                    click.echo(json.dumps(change.as_json()))
            before = {key: survey for key, survey in known.items() if not is_idle(survey)}
            known = _look_later(locks, pattern, before, interval)
    except KeyboardInterrupt:
        pass


def _look(locks: Locks, pattern: str | None, before: Mapping[str, LockState]) -> dict[str, LockState]:
    """All present locks, and the changes of the former ones."""
    found = {survey.key: survey for survey in locks.surveys(pattern)}
    left = [key for key in before if key not in found]
    return found | {survey.key: survey for survey in locks.store.survey(left)}


def _look_later(
    locks: Locks, pattern: str | None, before: Mapping[str, LockState], interval: float
) -> dict[str, LockState]:
    while True:
        time.sleep(interval)
        try:
            return _look(locks, pattern, before)
        except StoreError as error:
            # It may come back.
            click.echo(str(error), err=True)


def _draw(known: Mapping[str, LockState]) -> None:
    columns, height = shutil.get_terminal_size()
    rows = in_order(row for survey in known.values() for row in rows_of(survey))
    lines = table(rows).splitlines() if rows else ["No locks."]
    if len(lines) >= height:
        lines = [*lines[: height - 2], f"... and {len(lines) - height + 2} more"]
    drawn = "".join(f"{line[:columns]}{_TO_END_OF_LINE}\n" for line in lines)
    click.echo(f"{_HOME}{drawn}{_TO_END_OF_SCREEN}", nl=False, color=True)


# The changes.


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        at: When it was, or was seen, by the store's clock.
        event: `taken_over` if the earlier holder has ended without a release, `expired` if nobody has come after it.
        key: The lock key.
        task_id: The task id of the holder or call, if it is known.
        hostname: Its worker, or machine.
    """

    at: datetime
    event: Event
    key: str
    task_id: str | None = None
    hostname: str | None = None

    def as_json(self) -> dict[str, Any]:
        about = {"key": self.key, "task_id": self.task_id, "hostname": self.hostname}
        return {"at": self.at.isoformat(), "event": self.event, **about}


def changes(before: Mapping[str, LockState], after: Mapping[str, LockState]) -> list[Change]:
    """All changes, in the order of their times; *after* has each key of *before*."""
    pairs = ((before.get(key, LockState(key, 0, None, (), (), 0)), survey) for key, survey in after.items())
    return sorted((change for pair in pairs for change in _changes_of(*pair)), key=lambda change: change.at)


def is_idle(survey: LockState) -> bool:
    return not (survey.holders or survey.marks or survey.waiters)


def _changes_of(before: LockState, after: LockState) -> Iterator[Change]:
    held, holds = ({each.token: each for each in survey.leases} for survey in (before, after))
    gone = [holder for token, holder in held.items() if token not in holds]
    come = [holder for token, holder in holds.items() if token not in held]
    seen_at = _moment(after)
    dead = [holder for holder in gone if _deadline(before, holder) <= seen_at]
    taken_over = [holder for holder in come if any(_deadline(before, each) <= holder.acquired_at for each in dead)]
    for holder in gone:
        if holder not in dead:
            yield _change(min((each.acquired_at for each in come), default=seen_at), "released", holder)
        elif not taken_over:
            yield _change(seen_at, "expired", holder)
    for holder in come:
        yield _change(holder.acquired_at, "taken_over" if holder in taken_over else "acquired", holder)
    known = {(mark.state, mark.task_id) for mark in before.marks}
    for mark in after.marks:
        if mark.state != "quiet" and (mark.state, mark.task_id) not in known:
            yield Change(seen_at, "waiting", after.key, mark.task_id)
    for _ in range(after.waiters - before.waiters):
        yield Change(seen_at, "waiting", after.key)


def _deadline(survey: LockState, holder: Holder) -> datetime:
    """The deadline that was known then; a lease that is renewed always has two thirds of its ttl left."""
    return _moment(survey) + timedelta(seconds=holder.expires_in)


def _moment(survey: LockState) -> datetime:
    return datetime.fromtimestamp(survey.at / 1_000_000, UTC)


def _change(at: datetime, event: Event, holder: Holder) -> Change:
    return Change(at, event, holder.key, holder.task_id, holder.hostname)
