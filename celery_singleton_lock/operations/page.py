"""What the page of the locks shows, in Flask and in Django's admin."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from celery import Celery

from celery_singleton_lock.beat import last_leader_of
from celery_singleton_lock.checks import try_store
from celery_singleton_lock.definition.options import as_set
from celery_singleton_lock.errors import REASONS_TO_STOP, ConfigurationError, StoreError, StoreRefused
from celery_singleton_lock.log import shown
from celery_singleton_lock.operations.rows import OF_ONE_PROCESS, Locks, Row, a_few, duration, event_cells, matches
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import HolderState
from celery_singleton_lock.stores.redis.answers import in_short

T = TypeVar("T")

_PATIENCE = 1.75  # seconds for which a request waits
_SLOW = _PATIENCE / 4  # seconds; a look that takes longer is slow
_TRIAL = 1.25  # seconds; less than `_PATIENCE`, otherwise a request would end before the error of the trial comes
_TRIED_EVERY = 3.0  # seconds
_AGAIN_AFTER_AN_ERROR = 1.0  # seconds
_REST = 20  # an answer is reused for 20 times the duration of its look, to spare the store
_AT = "{:%Y-%m-%d %H:%M:%S}"
_MOST_ROWS = 200
_MOST_WAITERS = 10
_MOST_EVENTS = 20
_LONG_WAIT = 900.0  # seconds after which a call that waits is a fault, as in docs/alerts.yml


class Look(Generic[T]):
    """Runs *see* in a thread, never twice at once. All requests share the answer, for at least *rest* seconds."""

    last: T | None = None  # the last answer, however old
    took = 0.0  # seconds of the last look; 0 after an error
    _began_at = 0.0

    def __init__(self, see: Callable[[], T], rest: float = 0.0) -> None:
        self._see = see
        self._rest = rest
        self._beginning = threading.Lock()
        self.forget()

    def forget(self) -> None:
        self._answer: Future[T] | None = None
        self._serves_until = self.took = 0.0

    def begin(self) -> "Future[T]":
        """The last answer, or the next one if the last is too old."""
        with self._beginning:
            answer = self._answer
            if answer is None or (answer.done() and clock() >= self._serves_until):
                answer = Future()
                threading.Thread(target=self._look, args=(answer,), daemon=True).start()
                self._answer = answer
                self._began_at = clock()
            return answer

    def result(self) -> T:
        """The answer. If it is late, and the previous look was slow, the previous answer."""
        try:
            return self.begin().result(max(0.0, self._began_at + _PATIENCE - clock()))
        except TimeoutError:
            if self.last is not None and self.took > _SLOW:
                return self.last
            raise StoreError("", f"TimeoutError: no answer within {_PATIENCE:g} s") from None

    def _look(self, answer: "Future[T]") -> None:
        began_at = clock()
        try:
            found = self._see()
        except Exception as error:  # noqa: BLE001 (raised in each request that waits)
            self.took = 0.0
            self._serves_until = clock() + _AGAIN_AFTER_AN_ERROR
            answer.set_exception(error)
        else:
            self.last = found
            self.took = clock() - began_at
            self._serves_until = clock() + max(self._rest, _REST * self.took)
            answer.set_result(found)


class Snapshot(NamedTuple):
    at: datetime
    rows: list[Row]
    beat_leads: bool | None  # None if there has never been a beat, or if that is unknown

    def named(self, pattern: str) -> list[Row]:
        return [row for row in self.rows if matches(row.lock.key, f"*{pattern}*")]


class Observer:
    def __init__(self, app: Celery) -> None:
        self.app = app
        self.trial = Look(partial(try_store, app, _TRIAL), _TRIED_EVERY)
        self.locks = Look(partial(_snapshot, app))
        self.counts = Look(lambda: Locks(app).counted())
        self.history = Look(lambda: Locks(app).history())

    def problem(self) -> StoreError | ConfigurationError | None:
        try:
            self.trial.result()
        except (StoreError, ConfigurationError) as error:
            return error
        return None

    def told(self, error: StoreError | ConfigurationError) -> str:
        """The text of an error without the store's address, which the page has already."""
        text = str(error)
        if isinstance(error, StoreError):
            text = f"{error.problem}: {error.advice}" if isinstance(error, StoreRefused) else error.problem
        return as_set(self.app, text)


def _snapshot(app: Celery) -> Snapshot:
    at, locks, beat_leads = datetime.now(UTC), Locks(app), None
    with suppress(StoreError, ConfigurationError):
        leads, last = last_leader_of(app, locks.store)
        beat_leads = leads if leads or last else None
    return Snapshot(at, locks.rows(), beat_leads)


def why(error: StoreError | ConfigurationError) -> str:
    """Why runs cannot lock. `/healthz` shows this without a password, so the text must have no address."""
    return in_short(error.problem) if isinstance(error, StoreError) else "the settings of the store cannot work"


@dataclass
class Total:
    held: int = 0
    waiting: int = 0
    queued: int = 0
    longest: float = 0.0
    queued_for: float = 0.0


def totals_of(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, Total]:
    totals = defaultdict[str, Total](Total)
    counted = set()
    for row in (row for row in rows if not row.is_beat):
        total = totals[name_of(row)]
        if row.about.has_lease:
            total.held += 1
            total.longest = max(total.longest, row.age or 0.0)
        elif row.about.is_queued_or_next:
            total.queued += 1
            total.queued_for = max(total.queued_for, row.queued_for or 0.0)
        if row.lock.key not in counted:
            # Each row has all waiters of its lock.
            counted.add(row.lock.key)
            total.waiting += row.lock.waiting
    return totals


def page_context(observer: Observer, pattern: str) -> dict[str, Any]:
    """The facts for a template, which must escape them for HTML. With a `problem` there are no locks."""
    name = shown(observer.app.main or "this app")
    facts: dict[str, Any] = {"name": name, "pattern": shown(pattern), "now": _AT.format(datetime.now(UTC))}
    for look in (observer.trial, observer.locks, observer.history):
        look.begin()
    trouble = observer.problem()
    if trouble is not None:
        facts["trouble"] = {"why": why(trouble), "detail": observer.told(trouble)}
    try:
        locks = Locks(observer.app)
        facts["address"] = locks.store.address
        seen = observer.locks.result()
    except (StoreError, ConfigurationError) as error:
        return facts | {"problem": observer.told(error)}
    events = None
    with suppress(StoreError, ConfigurationError):
        events = observer.history.result() if locks.store.history else None
    rows = seen.named(pattern)
    recent = [event for event in events or () if matches(event["key"], f"*{pattern}*")][:_MOST_EVENTS]
    verdict = verdict_on(seen, events)
    if trouble is not None:
        # The store may have refused to record events, and the last hour would look quiet.
        del verdict["facts"]["Last hour"]
    return facts | {
        "now": _AT.format(seen.at),
        "alone": OF_ONE_PROCESS if locks.store.is_of_one_process else None,
        "verdict": verdict,
        "lines": list(_lines(rows)),
        "more": max(0, len(rows) - _MOST_ROWS),
        "events": [{head: shown(text or "-") for head, text in event_cells(event).items()} for event in recent],
        "extent": locks.extent(events, len(recent)),
    }


def verdict_on(seen: Snapshot, events: Iterable[Mapping[str, Any]] | None) -> dict[str, Any]:
    """The top of the page. *events* is None if they are unknown."""
    rows, leads = seen.rows, seen.beat_leads
    last_hour = [event for event in events or () if event["at"] > (seen.at - timedelta(hours=1)).isoformat()]
    kinds = Counter(event_cells(event)["event"] for event in last_hour).most_common()
    happened = shown(a_few([f"{number} {kind}" for kind, number in kinds], most=5)) or "nothing unusual"
    dead = len([row for row in rows if row.about.is_unrenewed])
    broken = len([row for row in rows if row.about.state is HolderState.UNREADABLE])
    waits = [seconds for row in rows for seconds in (row.queued_for, *map(row.waits_for, row.lock.turns)) if seconds]
    wrong = sum(event["event"] != "conflict" and event["outcome"] not in REASONS_TO_STOP for event in last_hour)
    faults = {
        "no beat leads": leads is False,
        f"{dead} {'lease is' if dead == 1 else 'leases are'} not renewed": dead,
        f"{broken} {'key' if broken == 1 else 'keys'} cannot be read": broken,
        f"a call waits for {duration(max(waits, default=0.0))}": max(waits, default=0.0) > _LONG_WAIT,
        f"{wrong} {'fault' if wrong == 1 else 'faults'} in the last hour": wrong,
    }
    text = "; ".join(fault for fault, is_so in faults.items() if is_so) or "the locks are well"
    total = totals_of(rows, lambda _: "").get("", Total())
    facts: dict[str, Any] = {} if leads is None else {"Beat": "leads" if leads else "none leads"}
    facts |= {"Held": total.held, "Waiting": total.waiting, "Queued": total.queued}
    facts["Oldest wait"] = duration(max(waits, default=None))
    facts["Last hour"] = "not known" if events is None else happened
    return {"is_well": not any(faults.values()), "text": f"{text[0].upper()}{text[1:]}.", "facts": facts}


def _lines(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    named = set[str]()
    for row in rows[:_MOST_ROWS]:
        turns = () if row.lock.key in named else row.lock.turns[:_MOST_WAITERS]
        named.add(row.lock.key)
        waiting = [f"{turn.task_id or 'a Lock'} for {duration(row.waits_for(turn))}" for turn in turns]
        told = {
            "state": "beat" if row.is_beat else row.state,
            "waiting": a_few(waiting, row.lock.waiting, most=_MOST_WAITERS) if waiting else "",
            "asked_by": row.asked_by,
            "left": f"{duration(row.left)} of {duration(row.about.ttl)}" if row.about.has_lease else duration(row.left),
        }
        # `shown` escapes lone surrogates, which UTF-8 cannot encode.
        texts = {head.replace(" ", "_"): shown(text or "") for head, text in (row.cells | told).items()}
        yield {**texts, "row": row}
