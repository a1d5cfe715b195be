"""Locks in traces: conflicts, waits and losses, in the spans of OpenTelemetry's Celery instrumentation.

Install `celery-singleton-lock[otel]` and an SDK of OpenTelemetry, and call `instrument`.
"""

import time
from functools import partial
from typing import Any

from celery.signals import task_postrun
from opentelemetry import trace

from celery_singleton_lock import signals
from celery_singleton_lock.errors import REASONS_TO_STOP
from celery_singleton_lock.runs.message import run_of
from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.records import Holder

_UID = "celery_singleton_lock.otel"


def instrument(tracer_provider: trace.TracerProvider | None = None) -> None:
    """Show locks in traces from now on, in this process and its children.

    May be called before or after Celery's instrumentation.

    Arguments:
        tracer_provider: Makes the spans of waits (default: the global one).
    """
    tracer = trace.get_tracer("celery_singleton_lock", tracer_provider=tracer_provider)
    signals.lock_conflict.connect(_show_conflict, weak=False, dispatch_uid=_UID)
    task_postrun.connect(partial(_show_run, tracer), weak=False, dispatch_uid=_UID)
    # Ours goes first: the receiver of Celery's instrumentation ends the span.
    task_postrun.receivers.sort(key=lambda receiver: receiver[0][0] != _UID)


def uninstrument() -> None:
    """Stop showing locks in traces."""
    signals.lock_conflict.disconnect(dispatch_uid=_UID)
    task_postrun.disconnect(dispatch_uid=_UID)


def _show_conflict(key: str, holder: Holder, outcome: str, **_: object) -> None:
    # The signal is sent in the thread of the task, so the task's span is current.
    span = trace.get_current_span()
    facts = {"singleton_lock.key": key, "singleton_lock.outcome": outcome}
    if holder.task_id:
        facts["singleton_lock.holder.task_id"] = holder.task_id
    span.add_event("singleton_lock.conflict", facts)
    # An unpublished call has no span of its own: the current span is its caller's.
    if outcome != "unpublished":
        span.set_attributes(facts)


def _show_run(tracer: trace.Tracer, task: Any, **_: object) -> None:
    run = run_of(task.request)
    span = trace.get_current_span()
    if run is None or not run.lease.was_granted or not span.is_recording():
        return
    lease = run.lease
    key = {"singleton_lock.key": lease.key}
    span.set_attributes({**key, "singleton_lock.fence": lease.fence, "singleton_lock.took_over": lease.grant.took_over})
    if lease.waited:
        began_at = time.time_ns() - round((clock() - lease.grant.sent_at) * 1e9)
        since = began_at - round(lease.waited * 1e9)
        tracer.start_span("singleton_lock wait", start_time=since, attributes=key).end(began_at)
    if lease.lost_reason is not None:
        span.add_event("singleton_lock.lost", {**key, "singleton_lock.reason": lease.lost_reason})
        if lease.lost_reason not in REASONS_TO_STOP:
            span.set_status(trace.StatusCode.ERROR, f"the lock was lost: {lease.lost_reason}")
