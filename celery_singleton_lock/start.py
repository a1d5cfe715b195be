"""What a process looks at before its first task: options, pool, and what the store lets us do.

What can never work ends a worker or a beat. A store that is away may come back, so it is told and nothing more; and
so is all that a process finds which publishes, for it has other things to do.
"""

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import click
from celery import Celery, Task
from celery.platforms import EX_FAILURE

from celery_singleton_lock.definition import check_results, key_maker_of
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.leases.key import checked_name, key_of
from celery_singleton_lock.leases.lease import new_token
from celery_singleton_lock.leases.teller import Teller
from celery_singleton_lock.options import OPTIONS, check_setting, check_value, prefix_of
from celery_singleton_lock.runs.loss import wants_to_be_killed
from celery_singleton_lock.settings import open_store
from celery_singleton_lock.spelling import check_setting_names
from celery_singleton_lock.stores.base import lock_name_of

logger = logging.getLogger("celery_singleton_lock")

BOUND = 1.0
"""Seconds for which a start waits for the store."""

Question = Callable[[], object]
"""Something that raises a `ConfigurationError` if it cannot work."""

# And those of operators, who look after other locks while a task cannot work; `doctor` tells it.
_CHECKED_COMMANDS = ("worker", "beat", "singleton")
_looked_at: WeakKeyDictionary[Celery, object] = WeakKeyDictionary()
_held_back: WeakKeyDictionary[Celery, list[ConfigurationError]] = WeakKeyDictionary()
_in_background = Teller("start")


@contextmanager
def faults_held_back(app: Celery) -> Iterator[None]:
    """Keep the fault of a definition, if this process is about to tell it with all others, and then ends.

    Celery makes the tasks of a worker and of a beat before there is a log, and would show a traceback of the first.
    """
    try:
        yield
    except ConfigurationError as error:
        if not _holds_back(app, error):
            raise


def _holds_back(app: Celery, error: ConfigurationError) -> bool:
    context = click.get_current_context(silent=True)
    if context is None or context.find_root().invoked_subcommand not in _CHECKED_COMMANDS or app in _looked_at:
        return False
    _held_back.setdefault(app, []).append(error)
    return True


def check_worker(app: Celery, pool: type, *of_beat: Any) -> None:
    """Return if a worker with that pool can work, and the beat it has inside can answer those questions, its key first.

    Raises:
        SystemExit: It cannot; the log says why.
    """
    # So its pool processes and its beat do not look again.
    _is_first_look(app)
    tasks = lockable(app)
    of_pool = _about_pool(app, tasks, pool)
    if _tell_faults([*of_pool, *_about(app, tasks), *_about_beat(app, tasks, *of_beat)]):
        _end()


def check_beat(app: Celery, key: Callable[[], str], *questions: Question) -> None:
    """Return if a beat can work that leads by *key*, and can answer those *questions*.

    Raises:
        SystemExit: It cannot; the log says why.
    """
    tasks = lockable(app)
    # A worker that has it inside has looked at its tasks, and at the store for them.
    rest = _about(app, tasks) if _is_first_look(app) else []
    if _tell_faults([*_about_beat(app, tasks, key, *questions), *rest]):
        _end()


def check_definitions(app: Celery) -> None:
    """Return if a beat of another library, which the rest does not concern, has only tasks that can work.

    Raises:
        SystemExit: It has others; the log says which.
    """
    if app in _held_back and _tell_faults(_about_definitions(app, lockable(app))):
        _end()


def check_publisher(task: Task) -> None:
    """Have it told in the log, soon and once, if a process that publishes this task cannot work as it should."""
    app = task.app
    if app in _looked_at or app.conf.task_always_eager or not _is_first_look(app):
        return
    # It is not for us to have all tasks made now.
    tasks = lockable(app) if app.finalized else _lockable([task])
    _in_background.tell(partial(_tell_faults, _about(app, tasks)))


# For one who asks, and tells it himself.


def lockable(app: Celery) -> list[Any]:
    """The tasks of *app* that this library is about, by their names."""
    return _lockable(app.tasks.values())


def faults_of(app: Celery) -> list[str]:
    """What can never work in the settings of *app*, and in its tasks."""
    return _faults_in(_about_tasks(app, lockable(app)))


def faults_with(app: Celery, pool: type, queues: Container[str]) -> list[str]:
    """What can never work in a worker that has that pool, and takes messages from those *queues*."""
    return _faults_in(_about_pool(app, lockable(app), pool, queues))


def try_store(app: Celery, bound: float) -> None:
    """Do all that a run and a waiter do, within *bound* seconds.

    Raises:
        ConfigurationError: There is no store to use, or it does not let us.
        StoreError: Not all of it was answered in time.
    """
    tasks = lockable(app)
    _try(app, partial(_name_in_use, tasks), tasks, bound)


def _is_first_look(app: Celery) -> bool:
    """The same for the children of this process, which know of it."""
    mine = object()
    return _looked_at.setdefault(app, mine) is mine


def _lockable(tasks: Iterable[Any]) -> list[Any]:
    ours = [task for task in tasks if hasattr(type(task), "is_lockable") and task.is_lockable()]
    # Celery keeps them in no order, and the same faults shall be the same lines.
    return sorted(ours, key=lambda task: task.name)


def _about(app: Celery, tasks: list[Any]) -> list[Question]:
    """What has to work for those tasks, wherever they are published or run."""
    if not tasks:
        return []
    # A name that is in use, because the rights of a user may depend on it.
    return [*_about_tasks(app, tasks), partial(_check_store, app, partial(_name_in_use, tasks), tasks)]


def _about_tasks(app: Celery, tasks: list[Any]) -> list[Question]:
    return [
        partial(check_setting_names, app),
        *(partial(check_setting, app, name) for name in OPTIONS),
        *_about_definitions(app, tasks),
        *(partial(check_results, task, _of_task(task, "on_conflict")) for task in tasks),
        *(partial(getattr, task, "lock_options") for task in tasks),
    ]


def _about_pool(app: Celery, tasks: list[Any], pool: type, queues: Container[str] | None = None) -> list[Question]:
    """What has to work in a worker with that pool; of its queues, this process has those if nobody else knows them."""
    return [partial(_check_pool, app, pool), *(partial(_check_task, app, task, pool, queues) for task in tasks)]


def _about_beat(app: Celery, tasks: list[Any], *questions: Any) -> list[Question]:
    """What a beat needs beside those tasks; nothing without questions, for then there is none."""
    if tasks or not questions:
        return list(questions)
    key = questions[0]
    return [
        partial(check_setting_names, app),
        *questions,
        partial(_check_store, app, lambda: lock_name_of(key())),
    ]


def _about_definitions(app: Celery, tasks: list[Any]) -> list[Question]:
    """Each by itself: the first fault of a task must not hide the others."""
    return [
        *(partial(_raise, error) for error in _held_back.get(app, ())),
        *(partial(check_value, task, name) for task in tasks for name in OPTIONS),
        *(partial(key_maker_of, type(task)) for task in tasks),
    ]


def _raise(error: Exception) -> NoReturn:
    raise error


def _of_task(task: Any, name: str) -> Any:
    """The value of an option, whether it is allowed or not."""
    own = getattr(task, f"lock_{name}")
    return task.app.conf.get(f"singleton_lock_{name}", OPTIONS[name].default) if own is None else own


def _name_in_use(tasks: list[Any]) -> str:
    names = (task.lock_name or task.name for task in tasks)
    return next((name for name in names if isinstance(name, str)), "start")


def _tell_faults(questions: Iterable[Question]) -> bool:
    """Tell each fault in a line of its own; whether there was one."""
    faults = _faults_in(questions)
    for fault in faults:
        logger.critical("lock.misconfigured: %s", fault)
    return bool(faults)


def _faults_in(questions: Iterable[Question]) -> list[str]:
    """Each fault once."""
    return list(dict.fromkeys(fault for question in questions if (fault := _fault_in(question))))


def _fault_in(question: Question) -> str:
    try:
        question()
    except ConfigurationError as error:
        return str(error)
    except Exception:
        # Of a router, a provider of passwords or a setting of the user's, which may work the next time.
        logger.exception("lock.unchecked: a part of the check has failed, and the rest goes on")
    return ""


def _end() -> NoReturn:
    # Not the error itself: Celery would add a traceback of thirty lines, in which the ones that count are lost.
    raise SystemExit(EX_FAILURE)


def _check_task(app: Celery, task: Any, pool: type, queues: Container[str] | None) -> None:
    # Workers with other pools may take the queue of such a task.
    wants_to_be_killed(task, task.lock_options, has_process=_is_prefork(pool) or not _comes_here(app, task, queues))


def _comes_here(app: Celery, task: Any, queues: Container[str] | None) -> bool:
    """The worker takes messages from the queue of the task, as far as can be told before there is a call."""
    try:
        route = app.amqp.router.lookup_route(task.name, (), {}, {}, task) or {}
    except Exception:  # noqa: BLE001 (of a router of the user's, which needs to see a call)
        return True
    by_route = route if isinstance(route, str) else route.get("queue")
    queue = getattr(task, "queue", None) or by_route or app.conf.task_default_queue
    return getattr(queue, "name", queue) in (app.amqp.queues.consume_from if queues is None else queues)


def _check_pool(app: Celery, pool: type) -> None:
    url = app.conf.get("singleton_lock_url")
    if isinstance(url, str) and url.startswith("memory:") and _is_prefork(pool):
        raise ConfigurationError(
            f"singleton_lock_url={url!r} keeps locks in the memory of one process, and the processes of the pool "
            "'prefork' would each have their own; give the URL of a server, such as 'redis://localhost:6379/0', or "
            "start the worker with --pool threads, solo, gevent or eventlet"
        )


def _is_prefork(pool: type) -> bool:
    from celery.concurrency.prefork import TaskPool  # noqa: PLC0415 (of no use but in a worker)

    return issubclass(pool, TaskPool)


def _check_store(app: Celery, lock_name: Callable[[], str], tasks: Iterable[Any] = ()) -> None:
    """Have it told if there is no answer, which passes.

    Raises:
        ConfigurationError: There is no store to use, or it does not let us.
    """
    try:
        _try(app, lock_name, tasks)
    except ConfigurationError:
        raise
    except StoreError as error:
        event = (
            "lock.unready store=%s: acquire, wake-up and release did not work within %g s (%s); start it, or mend "
            "singleton_lock_url; until it answers, lock_on_store_error decides what becomes of each task"
        )
        logger.error(event, error.store, BOUND, error.problem)


def _try(app: Celery, lock_name: Callable[[], str], tasks: Iterable[Any], bound: float = BOUND) -> None:
    """With a lock of that name which nobody else can ask for."""
    ttls = [_of_task(task, "ttl") for task in tasks]
    key = key_of(prefix_of(app), checked_name(lock_name()), {"start": new_token()})
    # Connections of its own, which no pool process inherits.
    store = open_store(app)
    try:
        store.try_out(key, bound, [ttl for ttl in ttls if isinstance(ttl, int | float)])
    finally:
        store.close()
