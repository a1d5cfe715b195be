"""Traces of runs: a worker's own tracing, under OpenTelemetry's instrumentation of Celery."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.stores.records import Claim, Grant
from celery_singleton_lock.stores.redis.inventory import Inventory
from tests.servers import Server, missing
from tests.tracing import traced
from tests.waiting import SOON, until

try:
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    from celery_singleton_lock import otel
except ImportError:
    missing("OpenTelemetry's SDK and its instrumentation of Celery are not installed")

Body = Callable[[Any, str], Any]


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider


@pytest.fixture(params=["Celery first", "locks first"])
def instrumented(request: pytest.FixtureRequest, provider: TracerProvider) -> Iterator[None]:
    steps = [lambda: CeleryInstrumentor().instrument(tracer_provider=provider), lambda: otel.instrument(provider)]
    for step in steps if request.param == "Celery first" else reversed(steps):
        step()
    yield
    otel.uninstrument()
    CeleryInstrumentor().uninstrument()


@pytest.fixture
def app(valkey: Server) -> Iterator[Celery]:
    app = Celery("shop", broker=valkey.url, backend="cache+memory://")
    app.conf.singleton_lock_url = valkey.url
    yield app
    app.close()


def task_of(app: Celery, body: Body, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, name="shop.sync", **options)
    def sync(self: Any, key: str) -> Any:
        return body(self, key)

    return sync


def nothing(self: Any, key: str) -> str:
    return "ran"


def take(app: Celery, key: str) -> tuple[Claim, Grant]:
    claim = Claim(key, "token", 60.0, task_id="the-holder")
    grant = store_of(app).acquire(claim)
    assert isinstance(grant, Grant)
    return claim, grant


def span_of_run(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = [span for span in spans.get_finished_spans() if span.name == "run/shop.sync"]
    return span


def attributes_of(span: Any) -> dict[str, Any]:
    return {name: value for name, value in span.attributes.items() if name.startswith("singleton_lock.")}


def events_of(span: ReadableSpan) -> dict[str, dict[str, Any]]:
    return {event.name: attributes_of(event) for event in span.events if event.name.startswith("singleton_lock.")}


def test_a_run_tells_its_key_and_its_fence(app: Celery, instrumented: None, spans: InMemorySpanExporter) -> None:
    fences = []
    task = task_of(app, lambda self, key: fences.append(self.lock.fence))

    traced(task, "k")

    (span,) = spans.get_finished_spans()
    assert attributes_of(span) == {
        "singleton_lock.key": task.lock_key_for("k"),
        "singleton_lock.fence": fences[0],
        "singleton_lock.took_over": False,
    }
    assert (events_of(span), span.status.status_code) == ({}, StatusCode.UNSET)


def test_a_run_that_waits_has_a_span_of_that(app: Celery, instrumented: None, spans: InMemorySpanExporter) -> None:
    task = task_of(app, nothing, lock_on_conflict="wait")
    claim, grant = take(app, task.lock_key_for("k"))
    began_at = time.time_ns()
    running = threading.Thread(target=traced, args=(task, "k"))
    running.start()
    until(lambda: store_of(app).survey([claim.key])[0].waiting == 1, "it waits", timeout=SOON)
    store_of(app).release(claim, grant.place)
    running.join(SOON)

    wait, of_run = sorted(spans.get_finished_spans(), key=lambda span: span.name != "singleton_lock wait")
    assert (wait.name, of_run.name) == ("singleton_lock wait", "run/shop.sync")
    assert wait.parent.span_id == of_run.context.span_id
    assert wait.kind is SpanKind.INTERNAL
    # The start is computed from two clocks, and the process may stand still between one look and the other.
    assert began_at - 1e9 <= wait.start_time < wait.end_time <= of_run.end_time + 1e9
    assert attributes_of(wait) == {"singleton_lock.key": claim.key}


@pytest.mark.parametrize(("force", "reason", "status"), [(True, "expired", "ERROR"), (False, "broken", "UNSET")])
def test_a_run_that_loses_its_lease_tells_why(
    app: Celery, instrumented: None, spans: InMemorySpanExporter, force: bool, reason: str, status: str
) -> None:
    def body(self: Any, key: str) -> None:
        Inventory(store_of(app)).break_lock(self.lock.key, [self.lock.token], "alice", force=force)
        for _ in range(1000 * SOON):
            time.sleep(0.001)

    task = task_of(app, body, lock_ttl=1)

    traced(task, "k")

    span = span_of_run(spans)
    facts = {"singleton_lock.key": task.lock_key_for("k"), "singleton_lock.reason": reason}
    assert events_of(span) == {"singleton_lock.lost": facts}
    assert span.status.status_code is StatusCode[status]


def test_a_run_that_is_skipped_tells_for_whom(app: Celery, instrumented: None, spans: InMemorySpanExporter) -> None:
    task = task_of(app, nothing)
    take(app, task.lock_key_for("k"))

    traced(task, "k")

    facts = {
        "singleton_lock.key": task.lock_key_for("k"),
        "singleton_lock.outcome": "skipped",
        "singleton_lock.holder.task_id": "the-holder",
    }
    assert attributes_of(span_of_run(spans)) == facts
    assert events_of(span_of_run(spans)) == {"singleton_lock.conflict": facts}
