"""The locks of an app in rows, one for each holder and each mark; and what happened to a call.

Whatever looks at the store raises `StoreError` if there is no answer in time.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from celery import Celery, states

from celery_singleton_lock.checks import lockable
from celery_singleton_lock.errors import ConfigurationError, LockHeld, LockLost, StoreError
from celery_singleton_lock.keys import start_of_keys
from celery_singleton_lock.options import option_of, prefix_of
from celery_singleton_lock.runs.endings import CallRevoked
from celery_singleton_lock.settings import store_of
from celery_singleton_lock.stores.base import lock_name_of
from celery_singleton_lock.stores.inventory import LeftMark, LockState, MarkState, hash_of
from celery_singleton_lock.stores.records import Holder
from celery_singleton_lock.stores.redis.store import Store

State = Literal["held", "waiting", MarkState]

OF_ONE_PROCESS = "The locks are in the memory of one process (memory://): this command sees only its own."
_NOW = {"held": "holds the lock", "waiting": "waits for the lock", "queued": "is queued", "next": "is next"}
_COLUMNS = 100
_CUT = {"LOCK", "LABEL", "WORKER"}
_BEGIN = 8
_SURVEYED_AT_ONCE = 100
_FACTS = ("task_name", "task_id", "hostname", "pid", "attempt", "acquired_at", "expires_in", "fence", "label")
"""Of a holder; a mark has some of them."""
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
        task_name, task_id, hostname, pid, attempt, acquired_at, fence, label: Of the holder, as far as they are known.
        asked_by: Who has asked the holder to end.
        waiting: Task ids of the first of those that wait, in the order of their turns; empty texts for `Lock`s.
        queued_for: Seconds for which a queued call is due, if this app knows its task.
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
    asked_by: str | None = None
    waiting: tuple[str, ...] = ()
    queued_for: float | None = None

    @property
    def name(self) -> str:
        return lock_name_of(self.key)

    @property
    def is_beat(self) -> bool:
        return self.task_name == "celery.beat"

    @property
    def worker(self) -> str:
        return worker_of(self)

    def as_json(self) -> dict[str, Any]:
        """As JSON, with the names of the docs; no row has a token, because a token allows a release."""
        rare = {"asked_by": self.asked_by, "queued_for": self.queued_for and round(self.queued_for, 3)}
        return {
            "key": self.key,
            "state": self.state,
            **self.facts(),
            "waiters": self.waiters,
            **{name: value for name, value in rare.items() if value is not None},
        }

    def facts(self) -> dict[str, Any]:
        rounded = {"expires_in": round(self.expires_in, 3)}
        moment = {"acquired_at": self.acquired_at.isoformat() if self.acquired_at else None}
        return {name: getattr(self, name) for name in _FACTS} | rounded | moment


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
        self._app = app
        self._start = start_of_keys(prefix_of(app))
        self.start = self._start.removesuffix("{")

    def is_key(self, text: str) -> bool:
        return re.fullmatch(re.escape(self._start) + _REST_OF_A_KEY, text) is not None

    def checked_key(self, text: str) -> str:
        """*text*, which is a lock key of this app.

        Raises:
            ConfigurationError: It is no lock key of this app.
        """
        if not self.is_key(text):
            raise ConfigurationError(
                f"{text!r} is not a lock key of this app: give one key as `list --wide` or the log shows it, "
                f"{self._start}<lock name>:<digest>}}; a pattern is not a key"
            )
        return text

    def counted(self) -> dict[str, int]:
        return self.store.counted(hash_of(self._start))

    def survey(self, key: str) -> LockState:
        (survey,) = self.store.survey([key])
        return survey

    def surveys(self, pattern: str | None = None) -> Iterator[LockState]:
        """All that is known of each lock whose name matches the glob *pattern*."""
        keys = self.store.keys(self._start)
        return self.surveys_of(
            key for key in keys if pattern is None or fnmatch.fnmatchcase(lock_name_of(key), pattern)
        )

    def surveys_of(self, keys: Iterable[str]) -> Iterator[LockState]:
        """All that is known of each of these keys, some at a time."""
        for batch in _batches(keys):
            yield from self.store.survey(batch)

    def found(self, pattern: str | None = None) -> tuple[list[Row], StoreError | None]:
        """The rows that could be found, and the reason why others could not."""
        rows = list[Row]()
        try:
            # One by one, so that those before an error are kept.
            for row in self.rows_in(self.surveys(pattern)):
                rows.append(row)
        except StoreError as error:
            return in_order(rows), error
        return in_order(rows), None

    def rows_in(self, surveys: Iterable[LockState]) -> Iterator[Row]:
        """The rows of these locks; a queued call with the time for which it is due, if this app knows its task."""
        # A mark ends `lock_queue_ttl` after its call is due; the time of its publication is not stored.
        ttls = dict[str, float]()
        for name, task in tasks_by_lock(self._app).items():
            # The other locks of an app whose task cannot work are listed all the same.
            with suppress(ConfigurationError):
                ttls[name] = task.lock_options.queue_ttl
        for survey in surveys:
            for row in rows_of(survey):
                ttl = ttls.get(row.name) if row.state == "queued" else None
                yield row if ttl is None else replace(row, queued_for=max(0.0, ttl - row.expires_in))

    def rows(self) -> list[Row]:
        rows, problem = self.found()
        if problem is not None:
            raise problem
        return rows


def tasks_by_lock(app: Celery) -> dict[str, Any]:
    """The tasks of an app by the name of their lock; of several with one name, the first."""
    named = ((option_of(task, "name") or task.name, task) for task in reversed(lockable(app)))
    # The checks of tasks know of a name that is no text.
    return {name: task for name, task in named if isinstance(name, str)}


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    """Some keys at a time; if one of several servers is away, those of the others come before the error."""
    batch, problem = list[str](), None
    try:
        for key in keys:
            batch.append(key)
            if len(batch) == _SURVEYED_AT_ONCE:
                yield batch
                batch = []
    except StoreError as error:
        problem = error
    yield batch
    if problem is not None:
        raise problem


def rows_about(survey: LockState, task_id: str) -> Iterator[Row]:
    yield from (row for row in rows_of(survey) if row.task_id == task_id)
    for waiter, seconds in survey.turns:
        if waiter == task_id:
            yield Row(survey.key, "waiting", survey.waiters, seconds, task_id=task_id)


def worker_of(about: Row | Holder) -> str:
    """Hostname and process, as far as they are known."""
    return ":".join(str(part) for part in (about.hostname, about.pid) if part is not None)


def is_of_one_process(store: Store) -> bool:
    """It is in memory, so no other process can see its locks."""
    return store.address.startswith("memory:")


def in_order(rows: Iterable[Row]) -> list[Row]:
    """First the holders, the oldest one first, and then the marks."""
    # Not by `held`: each key is looked at a moment after the one before.
    return sorted(rows, key=lambda row: (row.state != "held", row.acquired_at or _LATEST, row.key))


def rows_of(survey: LockState) -> Iterator[Row]:
    """The state of a key, in rows; a cool-down is quiet."""
    for holder in survey.holders:
        row = _row(survey, "quiet" if holder.is_on_hold else "held", holder)
        held = max(0.0, survey.at / 1_000_000 - holder.acquired_at.timestamp())
        yield replace(row, held=held, asked_by=survey.asked_by.get(holder.token))
    for mark in survey.marks:
        yield _row(survey, mark.state, mark)


def _row(survey: LockState, state: State, about: Holder | LeftMark) -> Row:
    facts: dict[str, Any] = {name: getattr(about, name, None) for name in _FACTS}
    return Row(survey.key, state, survey.waiters, waiting=tuple(task_id for task_id, _ in survey.turns), **facts)


def lock_as_json(survey: LockState, limit: int | None) -> dict[str, Any]:
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


# A call.


@dataclass(frozen=True)
class Call:
    """A call, as the result backend and the locks know it.

    Attributes:
        task_id: Its task id.
        state: Its state; `PENDING` also if nothing is known, None if results cannot be read.
        reason: Why it was not done, in a word, or None.
        key: The lock key that its result names.
        holder_task_id: Task id of the call that does the work instead; while it comes again, of the one it waits for.
        text: What its result says.
        rows: Where it holds a lock, waits for one, or has left a mark.
        problem: Why results cannot be read.
    """

    task_id: str
    state: str | None
    reason: str | None = None
    key: str | None = None
    holder_task_id: str | None = None
    text: str | None = None
    rows: tuple[Row, ...] = ()
    problem: str | None = None

    @property
    def is_known(self) -> bool:
        return bool(self.rows) or self.state not in (None, states.PENDING)

    @property
    def now(self) -> str | None:
        """What it does, in words, unless it has ended or nothing is known."""
        in_a_lock = [_NOW[row.state] for row in self.rows if row.state in _NOW]
        if in_a_lock or self.state != states.RETRY:
            return in_a_lock[0] if in_a_lock else None
        return "comes again" + (f", and waits for {self.holder_task_id or 'the lock'}" if self.key else "")

    def as_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("task_id", "state", "reason", "key", "holder_task_id")}
        return {**facts, "locks": [row.as_json() for row in self.rows], "text": self.text}


def call_of(app: Celery, locks: Locks, task_id: str) -> Call:
    """Look at the result of a call, and for its locks."""
    found = (row for survey in locks.surveys() for row in rows_about(survey, task_id))
    rows = tuple(in_order(found))
    try:
        kept = app.backend.get_task_meta(task_id)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises, or that there is none)
        return Call(task_id, None, rows=rows, problem=f"{type(error).__name__}: {error}".partition("\n")[0])
    state, result = kept["status"], kept.get("result")
    # A body may return an exception, which is a result as any other.
    if state not in states.EXCEPTION_STATES or not isinstance(result, BaseException):
        return Call(task_id, state, rows=rows)
    return Call(task_id, state, text=str(result) or type(result).__name__, rows=rows, **_facts_of(result, state))


def _facts_of(result: BaseException, state: str) -> dict[str, str | None]:
    """The data of an error of ours; an error of others may have attributes of the same names."""
    if not isinstance(result, CallRevoked | LockHeld | LockLost):
        return {}
    holder = getattr(result, "holder_task_id", None)
    return {
        # A call that comes again may still be done.
        "reason": None if state == states.RETRY else str(result.reason),
        "key": str(result.key),
        "holder_task_id": None if holder is None else str(holder),
    }


# For people: only the printable characters of keys and names reach a terminal.


def table(rows: Sequence[Row], *, is_wide: bool = False) -> str:
    """One line for each row, below a head; with a column of labels, if there is one.

    It fits 100 columns unless it is wide: of a task id and a digest it shows the beginning, and it cuts long names.
    """
    keys = [shown(row.key) for row in rows]
    ids = [shown(row.task_id or "-") for row in rows]
    columns: dict[str, Sequence[str]] = {
        "LOCK": [shown(row.name) for row in rows],
        "LABEL": [shown(row.label or "-") for row in rows],
        "STATE": [row.state for row in rows],
        "TASK ID": ids if is_wide else [_begin(task_id) for task_id in ids],
        "WORKER": [shown(row.worker or "-") for row in rows],
        "HELD": ["-" if row.held is None else duration(row.held) for row in rows],
        "LEFT": [duration(row.expires_in) for row in rows],
        "WAITING": [str(row.waiters) for row in rows],
        "KEY": keys if is_wide else [_begin(key.rpartition(":")[2].removesuffix("}")) for key in keys],
    }
    if not any(row.label for row in rows):
        del columns["LABEL"]
    widths = {head: max(map(len, (head, *cells))) for head, cells in columns.items()}
    while not is_wide and sum(widths.values()) + 2 * len(widths) - 2 > _COLUMNS:
        widths[max(_CUT & widths.keys(), key=lambda head: (widths[head], head))] -= 1
    cut = [[_cut(cell, widths[head]) for cell in (head, *cells)] for head, cells in columns.items()]
    return aligned(list(zip(*cut, strict=True)))


def _cut(text: str, width: int) -> str:
    """At most *width* characters of it, of both ends."""
    end = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - end]}…{text[-end:]}"


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """The lines, with columns of one width each."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def a_few(names: Sequence[str], of: int | None = None, *, most: int = 3) -> str:
    """The first few, and the number of the others, if there are *of* in all."""
    rest = (len(names) if of is None else of) - len(names[:most])
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _begin(text: str) -> str:
    return text if len(text) <= _BEGIN + 1 else f"{text[:_BEGIN]}…"


def duration(seconds: float) -> str:
    """`4.2s`, `3m12s`, `2h05m`, `3d04h`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def shown(text: str) -> str:
    """*text*, with what cannot be printed, such as the start of a colour, as an escape."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def lines_of(facts: Mapping[str, object]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"{name:{width}}  {shown(str(value))}" for name, value in facts.items() if value is not None)


def call_text(call: Call) -> str:
    facts = {
        "call": call.task_id,
        "state": call.state,
        "now": call.now,
        "reason": call.reason,
        "key": call.key,
        "holder": None if call.state == states.RETRY else call.holder_task_id,
        "text": call.text,
    }
    return lines_of(facts) + (f"\n\n{table(call.rows, is_wide=True)}" if call.rows else "")
