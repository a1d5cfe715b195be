"""The counters, and the present numbers of locks, in the text format of Prometheus.

Labels are names of tasks and words from fixed lists. A key, a task id or a worker is never a label, because there is
no end of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from celery_singleton_lock.errors import LostReason
from celery_singleton_lock.options import OnStoreError
from celery_singleton_lock.signals import ConflictOutcome
from celery_singleton_lock.stores.counts import BOUNDS, parts_of
from celery_singleton_lock.web.totals import Total

KIND = "text/plain; version=0.0.4"
_BUCKETS = (*(f"{bound:g}" for bound in BOUNDS), "+Inf")


@dataclass(frozen=True)
class Counter:
    """A counter or a histogram.

    Attributes:
        name: The name of the metric.
        means: Its meaning, in words.
        label: Its label, beside the task.
        values: The values that the label may have.
    """

    name: str
    means: str
    label: str = ""
    values: Sequence[str] = ("",)


COUNTERS = {
    "acquired": Counter("singleton_lock_acquired_total", "Leases that were granted."),
    "conflicts": Counter(
        "singleton_lock_conflicts_total",
        "Calls that were not granted their key, by what became of them.",
        "outcome",
        get_args(ConflictOutcome),
    ),
    "lost": Counter(
        "singleton_lock_lost_total", "Leases that ended while the body ran.", "reason", get_args(LostReason)
    ),
    "taken_over": Counter("singleton_lock_taken_over_total", "Leases whose holder before has died."),
    "unanswered": Counter(
        "singleton_lock_unanswered_total",
        "Calls to which the store gave no answer, by lock_on_store_error.",
        "policy",
        get_args(OnStoreError),
    ),
    "late": Counter("singleton_lock_late_total", "Renewals that came late, because the process got no time."),
}
HISTOGRAMS = {
    "held": ("singleton_lock_held_seconds", "The time for which released leases were held."),
    "waited": (
        "singleton_lock_waited_seconds",
        "The time for which runs and locks waited for their lease, from the first try.",
    ),
}
GAUGES = {
    "held": ("singleton_lock_holders", "Holders of a lease now."),
    "waiting": ("singleton_lock_waiters", "Waiters in the pool, or as a Lock, now."),
    "queued": ("singleton_lock_queued", "Calls that are queued, or are next."),
    "longest": ("singleton_lock_oldest_held_seconds", "The time for which the oldest holder has held its lease."),
}
UP = ("singleton_lock_up", "Whether the store answers.")
SCAN = ("singleton_lock_scan_seconds", "The time that the last look at all locks took.")


def names_of_metrics() -> list[str]:
    """The names of all series."""
    histograms = [f"{name}{end}" for name, _ in HISTOGRAMS.values() for end in ("_bucket", "_sum", "_count")]
    gauges = [name for name, _ in (*GAUGES.values(), UP, SCAN)]
    return [*(counter.name for counter in COUNTERS.values()), *histograms, *gauges]


def of_a_store_that_is_away() -> str:
    """All metrics that can be told then."""
    return _joined(_gauge(*UP, [({}, 0)]))


def of_a_store(
    counted: Mapping[str, int], tasks: Iterable[str], totals: Sequence[Total] | None, scan_seconds: float
) -> str:
    """All there is.

    Arguments:
        counted: The numbers in the store, by field.
        tasks: Names of tasks that are told with 0 if nothing was counted, so that a first event is a rise.
        totals: The present numbers, by task; None if they could not be looked up.
        scan_seconds: How long it took to look.
    """
    numbers = {parts_of(field): amount for field, amount in counted.items()}
    names = sorted({*tasks, *(task for _, _, task in numbers)})
    lines = [*_gauge(*UP, [({}, 1)])]
    for what, counter in COUNTERS.items():
        lines += _counter(what, counter, names, numbers)
    for what, (name, means) in HISTOGRAMS.items():
        lines += _histogram(what, name, means, numbers)
    if totals is not None:
        lines += _now(names, totals)
        lines += _gauge(*SCAN, [({}, scan_seconds)])
    return _joined(lines)


def _counter(
    what: str, counter: Counter, tasks: Sequence[str], numbers: Mapping[tuple[str, str, str], int]
) -> Iterator[str]:
    yield from _head(counter.name, "counter", counter.means)
    # Tell the counters of a newer version as well.
    labels = dict.fromkeys([*counter.values, *(label for name, label, _ in numbers if name == what)])
    for task in tasks:
        for label in labels:
            named = {"task": task, **({counter.label: label} if counter.label else {})}
            yield _sample(counter.name, named, numbers.get((what, label, task), 0))


def _histogram(what: str, name: str, means: str, numbers: Mapping[tuple[str, str, str], int]) -> Iterator[str]:
    yield from _head(name, "histogram", means)
    for task in sorted({task for each, _, task in numbers if each == what}):
        total = 0
        for bucket in _BUCKETS:
            total += numbers.get((what, bucket, task), 0)
            yield _sample(f"{name}_bucket", {"task": task, "le": bucket}, total)
        yield _sample(f"{name}_sum", {"task": task}, numbers.get((what, "sum", task), 0) / 1_000_000)
        yield _sample(f"{name}_count", {"task": task}, total)


def _now(tasks: Sequence[str], totals: Sequence[Total]) -> Iterator[str]:
    known = {total.name: total for total in totals}
    names = sorted({*tasks, *known})
    for what, (name, means) in GAUGES.items():
        yield from _gauge(
            name, means, [({"task": task}, getattr(known.get(task, Total(task)), what)) for task in names]
        )


def _gauge(name: str, means: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield from _head(name, "gauge", means)
    for labels, value in samples:
        yield _sample(name, labels, value)


def _head(name: str, kind: str, means: str) -> Iterator[str]:
    yield f"# HELP {name} {means}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{told}}} {value}" if told else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
