"""Steps of a worker: what it does at its start, and when it loses its broker."""

import logging
from collections.abc import Callable, Hashable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from celery.bootsteps import StartStopStep, Step
from celery.concurrency.solo import TaskPool as SoloPool
from celery.utils.imports import load_extension_class_names, symbol_by_name
from celery.worker import state
from celery.worker.control import inspect_command

from celery_singleton_lock.checks import check_worker, try_store
from celery_singleton_lock.definition import options, settings
from celery_singleton_lock.errors import ConfigurationError, SingletonLockError, StoreError
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.lease import new_token
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.redis.inventory import Inventory
from celery_singleton_lock.worker import SingletonRequest, active_requests


class Start(Step):
    """Checks the worker before its pool starts. A step can end the worker; a receiver of a signal could not."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, beat: bool = False, **kwargs: Any) -> None:
        check_worker(worker.app, worker.pool_cls, has_beat=beat and _has_our_scheduler(worker))
        super().__init__(worker, beat=beat, **kwargs)


def _has_our_scheduler(worker: Any) -> bool:
    from celery_singleton_lock.beat import SingletonSchedulerMixin  # noqa: PLC0415 (only beats need it)

    aliases = dict(load_extension_class_names("celery.beat_schedulers"))
    try:
        scheduler = symbol_by_name(worker.scheduler, aliases)
    except (ImportError, AttributeError):
        # Celery itself reports this.
        return False
    return issubclass(scheduler, SingletonSchedulerMixin)


@inspect_command()
def singleton_store(state: Any, bound: float = 0.5, **_: Any) -> dict[str, Any]:
    """Try the store from this worker, whose network and clock may differ from the operator's."""
    try:
        with closing(settings.open_store(state.app)) as store:
            if store.is_of_one_process:
                return {}
            try_store(state.app, bound)
            return {"ahead": Inventory(store).latency(bound)[1]}
    except (ConfigurationError, StoreError) as error:
        return {"problem": options.as_set(state.app, str(error))}


class LostConnection(StartStopStep):
    """After the loss of the broker, bodies go on, and their messages may be redelivered."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, consumer: Any) -> None:
        """Keep the jobs of a prefork pool if the connection is lost, and let a solo pool acknowledge at once."""
        pool: Any = getattr(consumer.pool, "_pool", None)
        if hasattr(pool, "flush"):
            consumer.pool.flush = _keeping_what_runs(pool, pool._cache)  # noqa: SLF001 (there is no other way)
        if isinstance(consumer.pool, SoloPool):
            # `call_soon_ack` is new in Celery 5.7.
            name = "call_soon_ack" if hasattr(consumer, "call_soon_ack") else "call_soon"
            # Wrap the method of the class: this step starts after each reconnection, and would wrap its own wrapper.
            call_soon = getattr(type(consumer), name).__get__(consumer)
            setattr(consumer, name, _acknowledging_at_once(call_soon))

    def stop(self, consumer: Any) -> None:  # noqa: ARG002
        """Expect copies of the running messages, unless the worker itself ends."""
        if state.should_stop is None and state.should_terminate is None:
            background.submit(partial(_expect_copies, active_requests()))


def _acknowledging_at_once(call_soon: Callable[..., Any]) -> Callable[..., Any]:
    """Acknowledge at once: Celery would wait for the bodies of all due messages, too long for some brokers."""

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__name__", "") == "ack_log_error":
            # After a failure that is not the connection's, let Celery try later.
            with suppress(Exception):
                return function(*args, **kwargs)
        return call_soon(function, *args, **kwargs)

    return call


def _expect_copies(running: list[SingletonRequest]) -> None:
    """Let these runs leave done markers: without one, a copy that asks after the run has ended runs again."""
    silent: dict[Hashable, SingletonLockError] = {}
    for request in running:
        lease = request.lease
        if lease is None:
            continue
        # Let only the first run wait for a store that is away, and mark the runs at other stores.
        error = silent.get(lease.store.part_of(lease.key))
        try:
            if error is None:
                # A limit of 0 grants no place.
                lease.store.acquire(replace(lease.claim, token=new_token(), limit=0, may_be_copy=True))
                continue
        except SingletonLockError as failed:
            error = silent[lease.store.part_of(lease.key)] = failed
        text = "a copy of it may run: %s"
        log.write(logging.WARNING, "lock.done_marker_failed", text, error, key=lease.key, task_id=request.id)


def _keeping_what_runs(pool: Any, jobs: dict[int, Any]) -> Callable[[], None]:
    """Flush as Celery does, but keep the jobs that run: an unacknowledged message would run once more.

    Celery before 5.7 forgets all jobs (celery/celery#8541). Later versions forget a job whose process has not reported
    its begin. As a worker stops, such a process waits 30 s for its result to be read.
    """

    def flush() -> None:
        stops = state.should_stop is not None
        running = {number: job for number, job in jobs.items() if job.accepted() or (stops and job._write_to)}  # noqa: SLF001
        pool.flush()
        jobs.update((number, job) for number, job in running.items() if not job.ready())

    return flush
