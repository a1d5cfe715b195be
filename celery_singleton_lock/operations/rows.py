"""Locks as rows, and what happened to a call."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from celery import Celery, states

from celery_singleton_lock.definition import keys, options, settings
from celery_singleton_lock.errors import ConfigurationError, LockHeld, LockLost, StoreError
from celery_singleton_lock.leases.counters import BEGINS_EVENT, hash_of
from celery_singleton_lock.log import shown
from celery_singleton_lock.runs.endings import CallRevoked
from celery_singleton_lock.stores.records import Holder, HolderState, LockState, lock_name_of
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.stores.redis.store import Store

OF_ONE_PROCESS = "The locks are in the memory of one process (memory://): this command sees only its own."
_NOW = {"held": "holds the lock", "waiting": "waits for the lock", "queued": "is queued", "next": "is next"}
_COLUMNS = 100
_CUT = {"lock", "label", "worker", "queue"}
_HIDDEN_IF_EMPTY = {"label", "queue"}
_SHORTENED = {"task id", "holder", "key"}
_BEGIN = 8  # letters
_DUE_NOW = 0.1  # seconds: the times of a mark are rounded
_SURVEYED_AT_ONCE = 100
_FACTS = ("task_name", "task_id", "hostname", "pid", "attempt", "acquired_at", "expires_in", "fence", "label")
_OF_A_MARK = ("task_name", "task_id", "label")
_OF_CALL = ("task_id", "state", "reason", "key", "holder_task_id", "locks", "text")


@dataclass(frozen=True)
class Row:
    lock: LockState
    about: Holder
    has_place: bool = False  # True for a holder, and for the cool-down after a run
    queued_for: float | None = None  # seconds since a queued call was due; None if its task is unknown
    due_in: float | None = None  # seconds until a queued call is due, if it has a countdown

    @property
    def state(self) -> str:
        """For operators, a holder that was asked to stop is still `held`."""
        return str(HolderState.HELD if self.about.has_lease else self.about.state)

    @property
    def name(self) -> str:
        return lock_name_of(self.lock.key)

    @property
    def is_beat(self) -> bool:
        return self.about.task_name == keys.BEAT

    @property
    def worker(self) -> str:
        return worker_of(self.about.hostname, self.about.pid)

    @property
    def age(self) -> float | None:
        if self.has_place:
            return max(0.0, self.lock.at / 1_000_000 - self.about.acquired_at.timestamp())
        return self.queued_for

    @property
    def left(self) -> float | None:
        return None if self.lock.problem else self.about.expires_in

    def waits_for(self, turn: Holder) -> float:
        return max(0.0, (self.lock.at - turn.refused_at) / 1_000_000)

    @property
    def position(self) -> int | None:
        return self.lock.turns.index(self.about) + 1 if self.about in self.lock.turns else None

    @property
    def asked_by(self) -> str | None:
        return self.lock.asked_by.get(self.about.token)

    @property
    def cells(self) -> dict[str, str | None]:
        return {
            "lock": self.name,
            "label": self.lock.problem or self.about.label,
            "state": "not renewed" if self.about.is_unrenewed else self.state,
            "queue": self.about.queue,
            "task id": self.about.task_id,
            "worker": self.worker,
            "held": duration(self.age) if self.due_in is None else f"in {duration(self.due_in)}",
            "left": duration(self.left),
            "waiting": str(self.lock.waiting),
            "key": self.lock.key,
        }

    def as_json(self) -> dict[str, Any]:
        """Without the token, with which anybody could release the lock."""
        known = {name: getattr(self.about, name) if self.has_place or name in _OF_A_MARK else None for name in _FACTS}
        rare = {
            "queue": self.about.queue,
            "queued_for": _rounded(self.queued_for),
            "due_in": _rounded(self.due_in),
            "position": self.position,
            "asked_by": self.asked_by,
            "not_renewed": self.about.is_unrenewed or None,
            "problem": self.lock.problem,
        }
        return {
            "key": self.lock.key,
            "state": in_json(self.state),
            **known,
            "acquired_at": self.about.acquired_at.isoformat() if self.has_place else None,
            "expires_in": _rounded(self.left),
            "waiters": self.lock.waiting,
            **{name: value for name, value in rare.items() if value is not None},
        }


class Locks:
    def __init__(self, app: Celery) -> None:
        self.app = app
        self.store: Store = settings.store_of(app)
        self.inventory = Inventory(self.store)
        self._start = keys.start_of_keys(options.prefix_of(app))

    def is_key(self, text: str) -> bool:
        return re.fullmatch(re.escape(self._start) + r"[^{}]+:[0-9a-f]{32}\}", text) is not None

    def counted(self) -> dict[str, int]:
        return self.inventory.counted(hash_of(self._start))

    def history(self) -> list[dict[str, Any]]:
        # If the answer to a batch was lost, its events are in the store twice.
        texts = set(self.store.fields(hash_of(self._start, "history")).values())
        events = [json.loads(text) for text in texts if text.startswith(BEGINS_EVENT)]
        return sorted(events, key=lambda event: str(event["at"]), reverse=True)[: self.store.history]

    def extent(self, kept: Sequence[Mapping[str, Any]] | None, number: int) -> str:
        since = f" since {event_cells(kept[-1])['when']} UTC" if kept else ""
        text = "What has happened is not known" if kept is None else f"{number} of {len(kept)} unusual events{since}"
        return options.as_set(self.app, f"{text} (singleton_lock_history={self.store.history}).")

    def survey(self, key: str) -> LockState:
        return next(self.surveys_of([key]))

    def surveys(self, pattern: str | None = None) -> Iterator[LockState]:
        """If a server fails, yield the locks of the other servers, and only then raise the error."""
        found = list[str]()
        try:
            found.extend(key for key in self.inventory.keys(self._start) if matches(key, pattern))
        except StoreError:
            yield from self.surveys_of(found)
            raise
        yield from self.surveys_of(found)

    def surveys_of(self, several: Sequence[str]) -> Iterator[LockState]:
        for start in range(0, len(several), _SURVEYED_AT_ONCE):
            yield from self.store.survey(several[start : start + _SURVEYED_AT_ONCE], tolerant=True)

    def rows(self, surveys: Iterable[LockState] | None = None, *, with_turns: bool = False) -> list[Row]:
        tasks = tasks_by_lock(self.app)
        found = self.surveys() if surveys is None else surveys
        rows = [_with_its_due_time(row, tasks) for survey in found for row in rows_of(survey, with_turns=with_turns)]
        return sorted(rows, key=lambda row: (not row.about.has_lease, -(row.age or 0.0), row.lock.key))


def matches(key: str, pattern: str | None) -> bool:
    return pattern is None or fnmatchcase(lock_name_of(key), pattern)


def _with_its_due_time(row: Row, tasks: Mapping[str, Sequence[Any]]) -> Row:
    mark = row.about
    if row.name not in tasks or mark.state is not HolderState.QUEUED:
        return row
    task, *others = tasks[row.name]
    if not others:  # a mark names no task
        row = replace(row, about=replace(mark, task_name=task.name))
    # A task with a wrong option must not hide the other locks.
    with suppress(ConfigurationError):
        # A mark outlasts the due time of its call by `due_for` seconds, or by `lock_queue_ttl` if `due_for` is 0.
        due_in = mark.expires_in - (mark.due_for or task.lock_options.queue_ttl)
        row = replace(row, queued_for=max(0.0, -due_in), due_in=due_in if due_in > _DUE_NOW else None)
    return row


def tasks_by_lock(app: Celery) -> dict[str, list[Any]]:
    found = defaultdict[str, list[Any]](list)
    for task in options.lockable(app):
        # A `lock_name` that is no `str` must not stop a command. The checks report it.
        found[str(keys.lock_name_of_task(task))].append(task)
    return found


def in_json(state: str) -> str:
    return "quiet" if state == "cooldown" else state


def worker_of(hostname: str | None, pid: int | None) -> str:
    return ":".join(str(part) for part in (hostname, pid) if part is not None)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def rows_of(survey: LockState, *, with_turns: bool = False) -> list[Row]:
    """Without *with_turns*, only the first turn has a row, and only if there is no other row."""
    if survey.problem is not None:
        return [Row(survey, Holder(survey.key, "", HolderState.UNREADABLE, datetime.now(UTC), 0.0, task_id=""))]
    found = [Row(survey, each, has_place=True) for each in survey.places] + [Row(survey, each) for each in survey.marks]
    number = len(survey.turns) if with_turns else int(not found)
    return found + [Row(survey, each) for each in survey.turns[:number]]


def call_of(locks: Locks, task_id: str) -> tuple[dict[str, Any], list[Row], str | None]:
    """What `show --json` says of a call; its rows; and, if its result cannot be read, the reason."""
    rows = [row for row in locks.rows(with_turns=True) if row.about.task_id == task_id]
    call = dict.fromkeys(_OF_CALL) | {"task_id": task_id, "locks": [row.as_json() for row in rows]}
    try:
        kept = locks.app.backend.get_task_meta(task_id)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises)
        return call, rows, f"{type(error).__name__}: {error}".partition("\n")[0]
    call["state"] = kept["status"]
    result = kept.get("result")
    # A body may return an exception, which is then an ordinary result.
    if call["state"] in states.EXCEPTION_STATES and isinstance(result, BaseException):
        call["text"] = str(result) or type(result).__name__
        # Users' errors may have the same attributes.
        if isinstance(result, CallRevoked | LockHeld | LockLost):
            # A requeued call may still run, so the reason is not final.
            call["reason"] = None if call["state"] == states.RETRY else result.reason
            call["key"] = result.key
            call["holder_task_id"] = getattr(result, "holder_task_id", None)
    return call, rows, None


def call_text(call: Mapping[str, Any], rows: Sequence[Row]) -> str:
    found = next((row for row in rows if row.state in _NOW), None)
    now = found and _NOW[found.state] + (f", position {found.position} in the line" if found.position else "")
    is_requeued = call["state"] == states.RETRY
    if is_requeued and now is None:
        now = f"is requeued, and waits for {call['holder_task_id'] or 'the lock'}" if call["key"] else "is requeued"
    facts = {
        "call": call["task_id"],
        "state": call["state"],
        "now": now,
        "reason": call["reason"],
        "key": call["key"],
        "holder": None if is_requeued else call["holder_task_id"],
        "text": call["text"],
    }
    return facts_and_rows(facts, rows)


def facts_and_rows(facts: Mapping[str, object], rows: Sequence[Row]) -> str:
    lines = aligned([(name, shown(str(value))) for name, value in facts.items() if value is not None])
    return f"{lines}\n\n{table([row.cells for row in rows], is_wide=True)}" if rows else lines


def event_cells(event: Mapping[str, Any]) -> dict[str, str | None]:
    return {
        "when": event["at"][:19].replace("T", " "),
        "event": " ".join(filter(None, (event["event"], event["outcome"]))),
        "lock": lock_name_of(event["key"]),
        "label": event["label"],
        "task id": event["task_id"],
        "holder": event["holder_task_id"],
        "worker": worker_of(event["hostname"], event["pid"]),
    }


def table(rows: Sequence[Mapping[str, str | None]], *, is_wide: bool = False) -> str:
    columns = {head: [row[head] for row in rows] for head in rows[0]}
    kept = {head: texts for head, texts in columns.items() if head not in _HIDDEN_IF_EMPTY or any(texts)}
    cells = {head: [head.upper(), *(shown(text or "-") for text in texts)] for head, texts in kept.items()}
    if not is_wide:
        cells |= {head: [text.rpartition(":")[2] for text in cells[head]] for head in {"key"} & cells.keys()}
        for head in _SHORTENED & cells.keys():
            cells[head] = [text if len(text) <= _BEGIN + 1 else f"{text[:_BEGIN]}…" for text in cells[head]]
        widths = {head: max(map(len, texts)) for head, texts in cells.items()}
        while sum(widths.values()) + 2 * len(widths) - 2 > _COLUMNS:
            widths[max(_CUT & widths.keys(), key=lambda head: (widths[head], head))] -= 1
        cells = {head: [_cut(text, widths[head]) for text in texts] for head, texts in cells.items()}
    return aligned(list(zip(*cells.values(), strict=True)))


def _cut(text: str, width: int) -> str:
    end = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - end]}…{text[-end:]}"


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    form = "  ".join(f"{{:{max(map(len, column))}}}" for column in zip(*lines, strict=True))
    return "\n".join(form.format(*line).rstrip() for line in lines)


def a_few(names: Sequence[str], of: int | None = None, *, most: int = 3) -> str:
    """*of* is the total number, if *names* is incomplete."""
    rest = (len(names) if of is None else of) - len(names[:most])
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def duration(seconds: float | None) -> str:
    """`4.2s`, `3m12s`, `2h05m`, `3d04h`; `-` if unknown."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"
