"""The state that a worker must keep when it loses its connection to the broker."""

from collections.abc import Callable
from typing import Any

from celery.bootsteps import StartStopStep
from celery.worker import state

from celery_singleton_lock.request import acknowledged, known
from celery_singleton_lock.stores.base import clock

# Seconds after which a broker has heard what was written to it, or the connection has broken.
_LOST_WITH_THE_CONNECTION = 60.0


class LostConnection(StartStopStep):
    """A step of the worker's consumer: it keeps running jobs, and expects just acknowledged messages again."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, consumer: Any) -> None:
        """Keep the jobs that run in a prefork pool, each time the connection is lost from now on."""
        pool: Any = getattr(consumer.pool, "_pool", None)
        if hasattr(pool, "flush"):
            consumer.pool.flush = _keeping_what_runs(pool, pool._cache)  # noqa: SLF001 (there is no other way)

    def stop(self, consumer: Any) -> None:  # noqa: ARG002
        """The connection is lost, or the worker ends."""
        if state.should_stop is None and state.should_terminate is None:
            since = clock() - _LOST_WITH_THE_CONNECTION
            for request in list(known):
                if request.acknowledged_at > since:
                    request.cut_off()
        acknowledged.clear()


def _keeping_what_runs(pool: Any, jobs: dict[int, Any]) -> Callable[[], None]:
    """Flush as Celery does from 5.7 on; before, Celery never hears how a running job ends (celery/celery#8541)."""

    def flush() -> None:
        running = {number: job for number, job in jobs.items() if job.accepted()}
        pool.flush()
        jobs.update((number, job) for number, job in running.items() if not job.ready())

    return flush
