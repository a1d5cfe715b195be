"""The counters, and the present numbers of locks, for Prometheus.

A key, a task id or a worker is no label, because each new value would be a series of its own in Prometheus.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from celery_singleton_lock.checks import lockable
from celery_singleton_lock.definition.options import OnStoreError
from celery_singleton_lock.errors import ConfigurationError, LostReason, StoreError
from celery_singleton_lock.leases.counters import BOUNDS
from celery_singleton_lock.operations.rows import Row, tasks_by_lock
from celery_singleton_lock.signals import ConflictOutcome
from celery_singleton_lock.web.page import Observer, Total, totals_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PARTS_OF_A_NAME = 3
_BUCKETS = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")

_COUNTERS = {
    "acquired": "Leases that were granted.",
    "conflicts": "Calls that were not granted their key, by what became of them.",
    "lost": "Leases that ended while the body ran.",
    "taken_over": "Leases granted after the lease of another holder ran out without a release.",
    "holder_died": "Holders whose pool process died, or whose lease ran out without a release.",
    "unlocked": "Runs without a lease: those of until_executing, or with lock_on_store_error='run'.",
    "unanswered": "Requests of runs and publishers that the store did not answer, or refused, by lock_on_store_error.",
    "late": "Renewals that came late, because the process got no time.",
}
# The label beside the task, and its values.
_LABELS = {
    "conflicts": ("outcome", get_args(ConflictOutcome)),
    "lost": ("reason", get_args(LostReason)),
    "unanswered": ("policy", get_args(OnStoreError)),
}
_HISTOGRAMS = {
    "held": "The time for which released leases were held.",
    "waited": "The time for which runs and locks waited for their lease, from the first try.",
}
_GAUGES = {
    "held": ("singleton_lock_holders", "Holders of a lease now."),
    "waiting": ("singleton_lock_waiters", "Calls and Locks in line for a lock, now."),
    "queued": ("singleton_lock_queued", "Calls that are queued, or are next."),
    "longest": ("singleton_lock_oldest_held_seconds", "The time for which the oldest holder has held its lease."),
    "queued_for": ("singleton_lock_oldest_queued_seconds", "The time for which the oldest queued call is due."),
}
_Numbers = Mapping[tuple[str, ...], int]


class Metrics(Collector):
    """All metrics of an app, or only the counters if its locks cannot be listed."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def collect(self) -> Iterator[Metric]:
        observer = self._observer
        for look in (observer.trial, observer.counts, observer.locks):
            look.begin()
        meaning = "Whether runs can lock: the store answers, and does what a run asks for."
        yield GaugeMetricFamily("singleton_lock_up", meaning, int(observer.problem() is None))
        # Keep the counters while the store is away: Prometheus sees no rise in a series that was missing before.
        counts = observer.counts.last
        with suppress(StoreError, ConfigurationError):
            counts = observer.counts.result()
            if counts.beat_leads is not None:
                meaning = "Whether a beat of this app leads."
                yield GaugeMetricFamily("singleton_lock_beat_leads", meaning, int(counts.beat_leads))
        if counts is None:
            return
        # The task, the last part of a field, may have colons. A later version may have fields of another form.
        named = ((tuple(field.split(":", 2)), amount) for field, amount in counts.numbers.items())
        numbers = {names: amount for names, amount in named if len(names) == _PARTS_OF_A_NAME}
        # Begin each counter of each task at 0, so that the first event is a rise.
        names = sorted({*(task.name for task in lockable(observer.app)), *(task for _, _, task in numbers)})
        yield from (_counter(what, names, numbers) for what in _COUNTERS)
        yield from (_histogram(what, numbers) for what in _HISTOGRAMS)
        # The store's user may have no right to list the keys.
        with suppress(StoreError, ConfigurationError):
            yield from _present(observer, names)


def _present(observer: Observer, names: Sequence[str]) -> Iterator[Metric]:
    rows = observer.locks.result().rows
    # If tasks share a lock name, its marks count for the first task.
    owners = {name: tasks[0].name for name, tasks in tasks_by_lock(observer.app).items()}

    def owner(row: Row) -> str:
        # A mark names no task, so its lock name decides. A `Lock` has no task, and counts under an empty name.
        return row.about.task_name or (owners.get(row.name, "") if row.about.task_id else "")

    totals = totals_of(rows, owner)
    for what, (metric, meaning) in _GAUGES.items():
        gauge = GaugeMetricFamily(metric, meaning, labels=["task"])
        for name in sorted({*names, *totals}):
            gauge.add_metric([name], getattr(totals.get(name, Total()), what))
        yield gauge
    broken = {row.lock.key for row in rows if row.lock.problem}
    yield GaugeMetricFamily("singleton_lock_unreadable", "Keys under the prefix that cannot be read.", len(broken))
    meaning = "The time that the last look at all locks took."
    yield GaugeMetricFamily("singleton_lock_scan_seconds", meaning, observer.locks.took)


def _counter(what: str, tasks: Sequence[str], numbers: _Numbers) -> Metric:
    label, values = _LABELS.get(what, ("", ("",)))
    labels = ["task", label] if label else ["task"]
    family = CounterMetricFamily(f"singleton_lock_{what}", _COUNTERS[what], labels=labels)
    # A newer version may have counted other values.
    values = tuple(dict.fromkeys([*values, *(value for name, value, _ in numbers if name == what)]))
    for task in tasks:
        for value in values:
            family.add_metric([task, value] if label else [task], numbers.get((what, value, task), 0))
    return family


def _histogram(what: str, numbers: _Numbers) -> Metric:
    family = HistogramMetricFamily(f"singleton_lock_{what}_seconds", _HISTOGRAMS[what], labels=["task"])
    for task in sorted({task for name, _, task in numbers if name == what}):
        total = 0
        buckets = list[tuple[str, float]]()
        for bucket in _BUCKETS:
            total += numbers.get((what, bucket, task), 0)
            buckets.append((bucket, total))
        family.add_metric([task], buckets, numbers.get((what, "sum", task), 0) / 1_000_000)
    return family
