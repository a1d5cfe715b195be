"""Checks of this process: locks in its memory that other processes need, and runs that want to be killed in it."""

from collections.abc import Container
from typing import Any

from celery import Celery

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.runs.run import kills_itself

_A_SERVER = "give the URL of a server, such as 'redis://localhost:6379/0'"


def check_worker_process(app: Celery, pool: type) -> None:
    """Return if the pool of a worker can use the app's locks.

    Raises:
        ConfigurationError: They are in memory, and it has several processes.
    """
    if _is_in_memory(app) and _is_prefork(pool):
        raise _of_one_process(
            app,
            "the processes of the pool 'prefork' would each have their own",
            f"{_A_SERVER}, or start the worker with --pool threads, solo, gevent or eventlet",
        )


def check_beat_process(app: Celery) -> None:
    """Return if a beat, which has a process of its own also inside a worker, can use the app's locks.

    Raises:
        ConfigurationError: They are in memory, so each beat would lead.
    """
    if _is_in_memory(app):
        raise _of_one_process(
            app,
            "each beat would lead by its own",
            f"{_A_SERVER}, or start a single beat with a scheduler of Celery's own, such as "
            "celery.beat:PersistentScheduler",
        )


def check_publishing_process(app: Celery, task: Any) -> None:
    """Return if a process without a worker can mark the calls of a task as queued.

    Raises:
        ConfigurationError: The marks would be in its memory, where no worker ends them.
    """
    broker = app.conf.broker_write_url or app.conf.broker_url or ""
    first = broker if isinstance(broker, str) else str([*broker, ""][0])
    if _is_in_memory(app) and not first.startswith("memory:"):
        raise _of_one_process(
            app,
            f"the workers are others, so a call of {task.name} counts as queued here for long after it has run",
            _A_SERVER,
        )


def check_ending(app: Celery, task: Any, pool: type, queues: Container[str] | None) -> None:
    """Return if a worker with that pool can end the runs of a task as the task wants.

    Arguments:
        app: The task's.
        task: The task.
        pool: The worker's pool.
        queues: The queues from which it takes messages; None if it is the worker of this process.

    Raises:
        ConfigurationError: It wants them killed, gets them from one of those queues, and has no process for each.
    """
    # Workers with other pools may take the queue of such a task.
    kills_itself(task, task.lock_options, has_process=_is_prefork(pool) or not _comes_here(app, task, queues))


def _comes_here(app: Celery, task: Any, queues: Container[str] | None) -> bool:
    """The worker takes messages from the queue of the task, as far as can be told before there is a call."""
    try:
        route = app.amqp.router.lookup_route(task.name, (), {}, {}, task) or {}
    except Exception:  # noqa: BLE001 (of a router of the user's, which needs to see a call)
        return True
    by_route = route if isinstance(route, str) else route.get("queue")
    queue = getattr(task, "queue", None) or by_route or app.conf.task_default_queue
    return getattr(queue, "name", queue) in (app.amqp.queues.consume_from if queues is None else queues)


def _is_in_memory(app: Celery) -> bool:
    url = app.conf.get("singleton_lock_url")
    return isinstance(url, str) and url.startswith("memory:")


def _of_one_process(app: Celery, why: str, remedy: str) -> ConfigurationError:
    url = app.conf.get("singleton_lock_url")
    return ConfigurationError(
        f"singleton_lock_url={url!r} keeps locks in the memory of one process, and {why}; {remedy}"
    )


def _is_prefork(pool: type) -> bool:
    from celery.concurrency.prefork import TaskPool  # noqa: PLC0415 (of no use but in a worker)

    return issubclass(pool, TaskPool)
