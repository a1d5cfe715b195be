"""The locks of an app in rows: one for each holder, one for each mark."""

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.key import start_of_keys
from celery_singleton_lock.options import prefix_of
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import Store, lock_name_of
from celery_singleton_lock.stores.counts import hash_of
from celery_singleton_lock.stores.inventory import LeftMark, MarkState, Survey
from celery_singleton_lock.stores.records import Holder

State = Literal["held", "waiting", MarkState]

_SURVEYED_AT_ONCE = 100
_LATEST = datetime.max.replace(tzinfo=UTC)
_REST_OF_A_KEY = r"[^{}]+:[0-9a-f]{32}\}"


@dataclass(frozen=True)
class Row:
    """A holder, a mark, or a call that waits.

    Attributes:
        key: The lock key.
        state: `held`, or `waiting`; for a mark, `queued`, `next` or `quiet`. A cool-down is `quiet`, too.
        waiters: How many wait for the key in the pool, or as a `Lock`.
        expires_in: Seconds until it ends, unless it is renewed.
        held: Seconds since it is held.
        task_name, task_id, hostname, pid, attempt, acquired_at, fence: Of the holder, as far as they are known.
        label: The text of the task's `lock_label` for the call, if it has one.
    """

    key: str
    state: State
    waiters: int
    expires_in: float
    held: float | None = None
    task_name: str | None = None
    task_id: str | None = None
    hostname: str | None = None
    pid: int | None = None
    attempt: int | None = None
    acquired_at: datetime | None = None
    fence: int | None = None
    label: str | None = None

    @property
    def worker(self) -> str:
        """Hostname and process, as far as they are known."""
        return ":".join(str(part) for part in (self.hostname, self.pid) if part is not None)

    def as_json(self) -> dict[str, Any]:
        """As JSON, with the names of the docs; no row has a token, because a token allows a release."""
        return {"key": self.key, "state": self.state, **self.facts(), "waiters": self.waiters}

    def facts(self) -> dict[str, Any]:
        """The known facts about the holder or the call."""
        return {
            "task_name": self.task_name,
            "task_id": self.task_id,
            "hostname": self.hostname,
            "pid": self.pid,
            "attempt": self.attempt,
            "acquired_at": self.acquired_at.isoformat() if self.acquired_at else None,
            "expires_in": round(self.expires_in, 3),
            "fence": self.fence,
            "label": self.label,
        }


class Locks:
    """The locks of an app, straight from their store.

    Arguments:
        app: The app.
        store: Its store, if not the one that the app uses.

    Attributes:
        start: The text with which each key of the app begins.

    Raises:
        ConfigurationError: It has no store that can be used.
    """

    def __init__(self, app: Celery, store: Store | None = None) -> None:
        self.store: Store = store or store_of(app)
        self._start = start_of_keys(prefix_of(app))
        self.start = self._start.removesuffix("{")

    def is_key(self, text: str) -> bool:
        """Whether it looks like a lock key of this app."""
        return re.fullmatch(re.escape(self._start) + _REST_OF_A_KEY, text) is not None

    def checked_key(self, text: str) -> str:
        """*text*, which is a lock key of this app.

        Raises:
            ConfigurationError: It is no lock key of this app.
        """
        if not self.is_key(text):
            raise ConfigurationError(
                f"{text!r} is not a lock key of this app: give one key as `list` or the log shows it, "
                f"{self._start}<lock name>:<digest>}}; a pattern is not a key"
            )
        return text

    def counted(self) -> dict[str, int]:
        """The counts of the locks, by field.

        Raises:
            StoreError: No answer in time.
        """
        return self.store.counted(hash_of(self._start))

    def survey(self, key: str) -> Survey:
        """All that is known of *key*.

        Raises:
            StoreError: No answer in time.
        """
        (survey,) = self.store.survey([key])
        return survey

    def surveys(self, pattern: str | None = None, task_id: str = "") -> Iterator[Survey]:
        """All that is known of each lock whose name matches the glob *pattern*; also whether a call waits for it.

        Raises:
            StoreError: No answer in time.
        """
        for batch in self._batches(pattern):
            yield from self.store.survey(batch, task_id)

    def _batches(self, pattern: str | None) -> Iterator[list[str]]:
        batch, problem = list[str](), None
        try:
            for key in self.store.keys(self._start):
                if pattern is None or fnmatch.fnmatchcase(lock_name_of(key), pattern):
                    batch.append(key)
                if len(batch) == _SURVEYED_AT_ONCE:
                    yield batch
                    batch = []
        except StoreError as error:
            problem = error
        yield batch
        if problem is not None:
            raise problem

    def found(self, pattern: str | None = None) -> tuple[list[Row], StoreError | None]:
        """The rows that could be found, and the reason why others could not."""
        rows = list[Row]()
        try:
            for survey in self.surveys(pattern):
                rows += rows_of(survey)
        except StoreError as error:
            return in_order(rows), error
        return in_order(rows), None

    def rows(self, pattern: str | None = None) -> list[Row]:
        """The rows of all locks: first the holders, the oldest one first, and then the marks.

        Raises:
            StoreError: No answer in time.
        """
        return in_order(row for survey in self.surveys(pattern) for row in rows_of(survey))


def rows_about(survey: Survey, task_id: str) -> Iterator[Row]:
    """The rows of one call, which may wait for the key."""
    yield from (row for row in rows_of(survey) if row.task_id == task_id)
    if survey.turn is not None:
        yield Row(survey.key, "waiting", survey.waiters, survey.turn, task_id=task_id)


def is_of_one_process(store: Store) -> bool:
    """It is in memory, so no other process can see its locks."""
    return store.address.startswith("memory:")


def in_order(rows: Iterable[Row]) -> list[Row]:
    """First the holders, the oldest one first, and then the marks."""
    # Not by `held`: each key is looked at a moment after the one before.
    return sorted(rows, key=lambda row: (row.state != "held", row.acquired_at or _LATEST, row.key))


def rows_of(survey: Survey) -> Iterator[Row]:
    """The state of a key, in rows."""
    for holder in survey.holders:
        yield row_of_holder(survey, holder)
    for mark in survey.marks:
        yield _row_of_mark(survey, mark)


def row_of_holder(survey: Survey, holder: Holder) -> Row:
    """A holder; a cool-down is quiet."""
    return Row(
        key=survey.key,
        state="quiet" if holder.is_on_hold else "held",
        waiters=survey.waiters,
        expires_in=holder.expires_in,
        held=max(0.0, survey.at / 1_000_000 - holder.acquired_at.timestamp()),
        task_name=holder.task_name,
        task_id=holder.task_id,
        hostname=holder.hostname,
        pid=holder.pid,
        attempt=holder.attempt,
        acquired_at=holder.acquired_at,
        fence=holder.fence,
        label=holder.label,
    )


def _row_of_mark(survey: Survey, mark: LeftMark) -> Row:
    return Row(
        survey.key,
        mark.state,
        survey.waiters,
        mark.expires_in,
        task_name=mark.task_name,
        task_id=mark.task_id,
        label=mark.label,
    )


def lock_as_json(survey: Survey, limit: int | None) -> dict[str, Any]:
    """All about one lock, in the words of the docs."""
    rows = list(rows_of(survey))
    return {
        "key": survey.key,
        "limit": limit,
        "fence": survey.fence,
        "holders": [row.facts() for row in rows if row.state == "held"],
        "waiters": survey.waiters,
        "queued": next((row.task_id for row in rows if row.state == "queued"), None),
        "next": next((row.task_id for row in rows if row.state == "next"), None),
        "quiet_for": max((round(row.expires_in, 3) for row in rows if row.state == "quiet"), default=None),
    }
