"""The combined tasks in a worker beside what many have in it; `TEST_NEIGHBOUR` says which."""

import os
from typing import Any

from celery import signals

from tests.acceptance.combined_app import app

__all__ = ["app"]

neighbour = os.environ.get("TEST_NEIGHBOUR", "")

if neighbour == "sentry":
    import sentry_sdk

    # The last version that writes a header named `headers`, with nothing but its defaults.
    sentry_sdk.init()

if neighbour == "datadog":

    @signals.before_task_publish.connect(weak=False)
    def _trace(headers: Any = None, **_: Any) -> None:
        """As ddtrace does with distributed tracing."""
        headers.setdefault("headers", {})["x-datadog-trace-id"] = "1"


if neighbour == "newrelic":
    from celery.app import trace
    from wrapt import CallableObjectProxy

    build_tracer = trace.build_tracer

    def _build_tracer(name: str, task: Any, *args: Any, **kwargs: Any) -> Any:
        """As New Relic's agent does: what Celery's signals send is a proxy of the task."""
        return build_tracer(name, CallableObjectProxy(task), *args, **kwargs)

    trace.build_tracer = _build_tracer
