"""The counts and the history of this process, which go to the store every five seconds and at exit."""

import atexit
import json
import os
import threading
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.records import Facts, Holder
from celery_singleton_lock.stores.redis.store import Store

_EVERY = 5.0
_BOUND = 1.0
_MOST_EVENTS, _MOST_RECORDED = 100_000, 1_000
BEGINS_EVENT = '{"at": "'
"""How each event in the hash of the history begins. The field `last`, a number, is no event."""
# Outcomes that the history leaves out, because the call still waits or is a copy.
_USUAL = ("rescheduled", "joined", "parked", "dropped")

# Of the buckets of a histogram, in seconds.
_UPPER_BOUNDS = (0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1800.0, 7200.0)
BUCKETS = (*(f"{bound:g}" for bound in _UPPER_BOUNDS), "+Inf")
"""The names of the buckets, in the store and in the metrics."""

What = Literal["acquired", "conflicts", "lost", "taken_over", "holder_died", "unlocked", "unanswered", "late", "held"]
"""What is counted. The value of `acquired` is the seconds waited, that of `held` the seconds held."""


def hash_of(key: str, what: Literal["stats", "history"] = "stats") -> str:
    """The hash for all locks with the prefix of *key*. Each field of `stats` is a sum, `<what>:<label>:<task>`."""
    return key.partition("{")[0] + what


class Counters:
    _pid = 0

    def __init__(self) -> None:
        self.ensure_own()

    def ensure_own(self) -> None:
        """Forget the counts of a parent process, which sends them itself."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._events: deque[tuple[Store, str, What, str, str, float]] = deque(maxlen=_MOST_EVENTS)
        self._recorded: deque[tuple[Store, str, dict[str, Any]]] = deque(maxlen=_MOST_RECORDED)
        # For each hash of a store, a `Counter` of sums, or a deque of texts for the history.
        self._unsent: dict[tuple[Store, str], Any] = {}
        self._will_flush = False
        self._flushing = threading.Lock()

    def add(self, store: Store, key: str, what: What, task: str, label: str = "", value: float = 0.0) -> None:
        """Count an event. Call this only after `heartbeat.watch`, which checks for a fork; elsewhere call `count`.

        Otherwise the count of a forked child would be lost, because `flush` would take it for the parent's.

        *task* is empty for a `Lock`. *label* is the outcome or the reason, and *value* is in seconds.
        """
        self._events.append((store, key, what, task, label, value))
        if not self._will_flush:
            self._flush_later()

    def record(
        self, store: Store, key: str, event: str, outcome: str, task: str, call: Facts | Holder, holder: Any = None
    ) -> None:
        """*holder* is the task id of the call in the way."""
        if not store.history or (event == "conflict" and outcome in _USUAL):
            return
        self.ensure_own()
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        what = {"at": at, "event": event, "outcome": outcome, "key": key, "task_name": task}
        facts = {"task_id": call.task_id, "hostname": call.hostname, "pid": call.pid, "label": call.label}
        self._recorded.append((store, key, what | facts | {"holder_task_id": holder}))
        if not self._will_flush:
            self._flush_later()

    def _flush_later(self) -> None:
        # No thread can start at exit, where `flush` is called anyway.
        with suppress(RuntimeError):
            background.submit(self.flush, _EVERY)
        self._will_flush = True

    def flush(self) -> None:
        if self._pid != os.getpid():
            return
        with self._flushing:
            try:
                self._send()
            finally:
                self._will_flush = False
                if self._unsent or self._events or self._recorded:
                    self._flush_later()

    def _send(self) -> None:
        self._add_up()
        for (store, key), batch in list(self._unsent.items()):
            try:
                (store.count if isinstance(batch, Counter) else store.record)(key, batch, _BOUND)
                del self._unsent[store, key]
                # A request during the flush may have opened a second connection.
                store.servers.close_spare()
            except (SingletonLockError, OSError) as error:
                text = "%s; the counts are kept, and sent in five seconds"
                why = getattr(error, "problem", error)
                log.info("lock.counters_failed", text, why, store=store.address)

    def _add_up(self) -> None:
        values_of = defaultdict[tuple[Store, str, What, str, str], list[float]](list)
        for store, key, what, task, label, value in _taken_from(self._events):
            values_of[store, key.partition("{")[0], what, task, label].append(value)
        for (store, start, what, task, label), values in values_of.items():
            sums = self._unsent.setdefault((store, hash_of(start)), Counter())
            # A lone surrogate cannot be sent.
            name = task.encode(errors="replace").decode()
            if what != "held":
                sums[f"{what}:{label}:{name}"] += len(values)
            if what in ("acquired", "held"):
                histogram = "waited" if what == "acquired" else "held"
                for index, number in Counter([bisect_left(_UPPER_BOUNDS, value) for value in values]).items():
                    sums[f"{histogram}:{BUCKETS[index]}:{name}"] += number
                if microseconds := round(sum(values) * 1_000_000):
                    sums[f"{histogram}:sum:{name}"] += microseconds
        for store, key, entry in _taken_from(self._recorded):
            texts = self._unsent.setdefault((store, hash_of(key, "history")), deque(maxlen=store.history))
            texts.append(json.dumps({name: value or None for name, value in entry.items()}))


def _taken_from(events: deque[Any]) -> list[Any]:
    # Other threads only append, so at least this many are there.
    return [events.popleft() for _ in range(len(events))]


counters = Counters()
record = counters.record


def count(store: Store, key: str, what: What, task: str, label: str = "") -> None:
    counters.ensure_own()
    counters.add(store, key, what, task, label)


# The pool processes of billiard skip `atexit`, so `receivers` flushes there.
atexit.register(counters.flush)
