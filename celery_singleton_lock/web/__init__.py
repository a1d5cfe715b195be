"""A page with the locks of an app, and metrics for Prometheus."""

import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import get_args

from celery import Celery

from celery_singleton_lock.definition.options import OnStoreError, lockable
from celery_singleton_lock.errors import ConfigurationError, LostReason, StoreError
from celery_singleton_lock.leases.counters import BUCKETS
from celery_singleton_lock.operations.page import Observer, Total, page_context, totals_of, why
from celery_singleton_lock.operations.rows import Row, tasks_by_lock
from celery_singleton_lock.signals import ConflictOutcome

try:
    from flask import Flask, Response, jsonify, render_template, request
    from flask.typing import ResponseReturnValue
    from prometheus_client import core, generate_latest
    from prometheus_client.registry import Collector
    from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server
except ModuleNotFoundError as error:
    needs = f"the page and the metrics need {error.name}: pip install 'celery-singleton-lock[web]'"
    raise ModuleNotFoundError(needs, name=error.name) from error

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TEXT = {"Content-Type": "text/plain; charset=utf-8"}
_METRICS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="singleton locks", charset="UTF-8"'}

# Never label a metric with a key, a task id or a worker: each value would be a new series in Prometheus.
_COUNTERS = {
    "acquired": "Leases that were granted.",
    "conflicts": "Calls that were not granted their key, by what became of them.",
    "lost": "Leases that ended while the body ran.",
    "taken_over": "Leases granted after the lease of another holder ran out without a release.",
    "holder_died": "Holders whose pool process died, or whose lease ran out without a release.",
    "unlocked": "Runs without a lease: those of until_executing, or with lock_on_store_error='run'.",
    "unanswered": "Requests of runs and publishers that the store refused or did not answer, by lock_on_store_error.",
    "late": "Renewals that came late, because the process got no time.",
}
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
    "queued_for": ("singleton_lock_oldest_queued_seconds", "The time for which the oldest queued call has been due."),
}
_Numbers = Mapping[tuple[str, ...], int]


def application(app: Celery, *, password: str | None = None, hosts: frozenset[str] | None = None) -> "Site":
    """A WSGI application with the locks of *app*: `/`, `/locks.json`, `/metrics` and `/healthz`.

    It frees no lock, and shows no arguments and no tokens. Without a *password* everybody who reaches it can read it,
    so mount it behind your sign-in. With a password, any user name is accepted. Requests for other host names than
    *hosts* are refused. On a developer's machine this stops other sites from reading the page by DNS rebinding.
    """
    return Site(app, password, hosts)


class _Client(WSGIRequestHandler):
    timeout = 10  # seconds, for a silent client

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...


class Site(Flask):
    def __init__(self, app: Celery, password: str | None, hosts: frozenset[str] | None) -> None:
        super().__init__(__name__, template_folder=".")
        self._password = password
        self._hosts = hosts
        self._observer = Observer(app)
        self.before_request(self._check_visitor)
        self.after_request(_with_headers)
        self.get("/")(self.page)
        self.get("/locks.json")(self.locks_json)
        self.get("/metrics")(self.metrics)
        self.get("/healthz")(self.healthz)

    def _check_visitor(self) -> ResponseReturnValue | None:
        host = re.sub(r":\d+$", "", request.environ.get("HTTP_HOST", "")).lower()
        if self._hosts is not None and host not in self._hosts:
            return "Ask for localhost, or set a password.\n", 421, _TEXT
        if self._password is not None and request.path != "/healthz":
            given = (request.authorization and request.authorization.password) or ""
            if not hmac.compare_digest(given.encode(), self._password.encode()):
                return "A password is needed.\n", 401, {**_TEXT, **_CHALLENGE}
        return None

    def page(self) -> ResponseReturnValue:
        context = page_context(self._observer, request.args.get("name", ""))
        refresh = request.args.get("refresh", 0, type=int)
        text = render_template("page.html", **context, refresh=refresh and max(2, refresh))
        return text, 503 if "problem" in context else 200

    def locks_json(self) -> ResponseReturnValue:
        try:
            rows = self._observer.locks.result().named(request.args.get("name", ""))
            return jsonify([row.as_json() for row in rows])
        except (StoreError, ConfigurationError) as error:
            return jsonify(problem=self._observer.told(error)), 503

    def metrics(self) -> ResponseReturnValue:
        return generate_latest(Metrics(self._observer)), _METRICS

    def healthz(self) -> ResponseReturnValue:
        trouble = self._observer.problem()
        if trouble is not None:
            return f"runs cannot lock: {why(trouble)}\n", 503, _TEXT
        return "ok\n", _TEXT

    def server(self, host: str, port: int) -> BaseWSGIServer:
        """A server that listens already. If the address cannot be used, Werkzeug ends the process."""
        return make_server(host, port, self, threaded=True, request_handler=_Client)


def _with_headers(response: Response) -> Response:
    response.headers.update(_HEADERS)
    return response


class Metrics(Collector):
    """The metrics of an app. If its locks cannot be listed, only the counters."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def collect(self) -> Iterator[core.Metric]:
        observer = self._observer
        for look in (observer.trial, observer.counts, observer.locks):
            look.begin()
        meaning = "Whether runs can lock: the store answers, and does what a run asks for."
        yield core.GaugeMetricFamily("singleton_lock_up", meaning, int(observer.problem() is None))
        # Keep the counters while the store is away: Prometheus would miss a rise after a gap.
        counts = observer.counts.last
        with suppress(StoreError, ConfigurationError):
            counts = observer.counts.result()
        if counts is None:
            return
        # A task's name, at the end of a field, may have colons. A later version may have other fields.
        of_ours = (field for field in counts if field.count(":") > 1)
        numbers = {tuple(field.split(":", 2)): counts[field] for field in of_ours}
        # Each counter begins at 0, so that Prometheus sees the first event as a rise.
        names = sorted({*(task.name for task in lockable(observer.app)), *(task for _, _, task in numbers)})
        yield from (_counter(what, names, numbers) for what in _COUNTERS)
        yield from (_histogram(what, numbers) for what in _HISTOGRAMS)
        # Listing the keys needs a right that the store's user may lack.
        with suppress(StoreError, ConfigurationError):
            yield from _present(observer, names)


def _present(observer: Observer, names: Sequence[str]) -> Iterator[core.Metric]:
    _, rows, leads = observer.locks.result()
    if leads is not None:
        yield core.GaugeMetricFamily("singleton_lock_beat_leads", "Whether a beat of this app leads.", int(leads))
    # A mark names no task, so it counts for the first task of its lock.
    owners = {name: tasks[0].name for name, tasks in tasks_by_lock(observer.app).items()}

    def owner(row: Row) -> str:
        return row.about.task_name or (owners.get(row.name, "") if row.about.task_id else "")

    totals = totals_of(rows, owner)
    for what, (metric, meaning) in _GAUGES.items():
        gauge = core.GaugeMetricFamily(metric, meaning, labels=["task"])
        for name in sorted({*names, *totals}):
            gauge.add_metric([name], getattr(totals.get(name, Total()), what))
        yield gauge
    broken = {row.lock.key for row in rows if row.lock.problem}
    yield core.GaugeMetricFamily("singleton_lock_unreadable", "Keys under the prefix that cannot be read.", len(broken))
    meaning = "The time that the last look at all locks took."
    yield core.GaugeMetricFamily("singleton_lock_scan_seconds", meaning, observer.locks.took)


def _counter(what: str, tasks: Sequence[str], numbers: _Numbers) -> core.Metric:
    label, values = _LABELS.get(what, ("", ("",)))
    labels = ["task", label] if label else ["task"]
    family = core.CounterMetricFamily(f"singleton_lock_{what}", _COUNTERS[what], labels=labels)
    # A newer version may have counted values that `_LABELS` lacks.
    values = tuple(dict.fromkeys([*values, *(value for name, value, _ in numbers if name == what)]))
    for task in tasks:
        for value in values:
            family.add_metric([task, value] if label else [task], numbers.get((what, value, task), 0))
    return family


def _histogram(what: str, numbers: _Numbers) -> core.Metric:
    family = core.HistogramMetricFamily(f"singleton_lock_{what}_seconds", _HISTOGRAMS[what], labels=["task"])
    for task in sorted({task for name, _, task in numbers if name == what}):
        total = 0
        buckets = list[tuple[str, float]]()
        for bucket in BUCKETS:
            total += numbers.get((what, bucket, task), 0)
            buckets.append((bucket, total))
        family.add_metric([task], buckets, numbers.get((what, "sum", task), 0) / 1_000_000)
    return family
