"""Locks in traces: conflict, wait and loss, on the spans of OpenTelemetry's instrumentation of Celery.

Nothing else of this library knows of it. It needs `celery-singleton-lock[otel]`, and does nothing until `instrument`
is called; without an SDK of OpenTelemetry it does nothing after that either.
"""

import os
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

from celery import Task
from celery.signals import task_postrun
from celery.utils.dispatch import Signal

from celery_singleton_lock import signals
from celery_singleton_lock.errors import MAKES_WAY
from celery_singleton_lock.leases.lease import Lease
from celery_singleton_lock.runs.run import Run
from celery_singleton_lock.stores.records import Holder
from celery_singleton_lock.task import SingletonTask

try:
    from opentelemetry import trace
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "celery_singleton_lock.otel needs OpenTelemetry, which is not installed: "
        "pip install 'celery-singleton-lock[otel]'",
        name=error.name,
    ) from error

_WAIT = "singleton_lock wait"
_NANO = 1_000_000_000


def instrument(tracer_provider: trace.TracerProvider | None = None) -> None:
    """Show locks in traces from now on, in this process and its children; a second call does nothing.

    Call it before or after the instrumentation of Celery, in each process that runs tasks.

    Arguments:
        tracer_provider: Makes the spans of waits; by default the global one.
    """
    _traces.connect(tracer_provider)


def uninstrument() -> None:
    """Stop showing locks in traces."""
    _traces.disconnect()


class _Traces:
    """Writes to the spans of runs. A signal is sent in the thread of its task, so the task's span is current."""

    def __init__(self) -> None:
        self._tracer: trace.Tracer | None = None
        self._start_over()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        self._lock = threading.Lock()
        # A loss is told in a thread that has no span. By weak references, because a lease that is left behind has to
        # end.
        self._spans: WeakKeyDictionary[Lease, trace.Span] = WeakKeyDictionary()

    def connect(self, tracer_provider: trace.TracerProvider | None) -> None:
        if self._tracer is None:
            self._tracer = trace.get_tracer("celery_singleton_lock", tracer_provider=tracer_provider)
            signals.lock_acquired.connect(self._acquired, weak=False)
            signals.lock_conflict.connect(self._conflict, weak=False)
            signals.lock_lost.connect(self._lost, weak=False)
            _connect_before_others(task_postrun, self._ends)

    def disconnect(self) -> None:
        self._tracer = None
        signals.lock_acquired.disconnect(self._acquired)
        signals.lock_conflict.disconnect(self._conflict)
        signals.lock_lost.disconnect(self._lost)
        task_postrun.disconnect(self._ends)
        self._start_over()

    def _acquired(self, sender: Any, lease: Lease, **_: object) -> None:
        span = trace.get_current_span()
        if not span.is_recording():
            return
        if lease.waited and self._tracer is not None:
            _tell_wait(self._tracer, span, lease)
        with self._lock:
            self._spans[lease] = span
        # One span may have many events of a `Lock`.
        if isinstance(sender, Task):
            span.set_attributes(
                {
                    "singleton_lock.key": lease.key,
                    "singleton_lock.fence": lease.fence,
                    "singleton_lock.took_over": lease.took_over,
                }
            )

    def _conflict(self, key: str, holder: Holder, outcome: str, **_: object) -> None:
        span = trace.get_current_span()
        if not span.is_recording():
            return
        facts = {"singleton_lock.key": key, "singleton_lock.outcome": outcome}
        if holder.task_id:
            facts["singleton_lock.holder.task_id"] = holder.task_id
        span.add_event("singleton_lock.conflict", facts)
        # The span of a call that was not published is its caller's.
        if outcome != "unpublished":
            span.set_attributes(facts)

    def _lost(self, lease: Lease, **_: object) -> None:
        self._tell_loss(lease)

    def _ends(self, task: Any = None, **_: object) -> None:
        # The thread that tells of losses may not have told of this one yet.
        run: Run | None = task.request.get("lock_run") if isinstance(task, SingletonTask) else None
        if run is not None and run.lease.lost:
            self._tell_loss(run.lease)

    def _tell_loss(self, lease: Lease) -> None:
        """Tell it once, and under the lock, because a run that ends meanwhile would end its span."""
        with self._lock:
            span = self._spans.pop(lease, None)
            if span is None or not span.is_recording():
                return
            reason = lease.lost_reason or "expired"
            span.add_event("singleton_lock.lost", {"singleton_lock.key": lease.key, "singleton_lock.reason": reason})
            if reason not in MAKES_WAY:
                span.set_status(trace.StatusCode.ERROR, f"the lock was lost: {reason}")


def _tell_wait(tracer: trace.Tracer, span: trace.Span, lease: Lease) -> None:
    """Make a span for the wait after its end, because a run that gets its key at once has no such span."""
    now = time.time_ns()
    wait = tracer.start_span(
        _WAIT,
        context=trace.set_span_in_context(span),
        start_time=now - round(lease.waited * _NANO),
        attributes={"singleton_lock.key": lease.key},
    )
    wait.end(now)


def _connect_before_others(signal: Signal, receiver: Any) -> None:
    """Connect first: Celery's instrumentation ends a run's span at the same signal, and may be connected already."""
    signal.connect(receiver, weak=False)
    signal.receivers.insert(0, signal.receivers.pop())


_traces = _Traces()
