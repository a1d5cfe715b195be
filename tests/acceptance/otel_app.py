"""The same tasks in workers whose pool processes write their spans to a file, a line of JSON each."""

import os
from pathlib import Path

from celery.signals import worker_process_init
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from celery_singleton_lock import otel
from tests.acceptance.app import app

__all__ = ["app"]


def as_line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"


@worker_process_init.connect(weak=False)
def trace_runs(**_: object) -> None:
    provider = TracerProvider()
    # Line by line, because both processes append to it.
    out = Path(os.environ["TEST_SPANS"]).open("a", buffering=1)  # noqa: SIM115 (until the process ends)
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=out, formatter=as_line)))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()
    otel.instrument()
