"""Checks before the first task of a process: options, pool, and the rights in the store.

What can never work ends a worker or a beat. A store that is away may come back, so it is only logged. A process that
publishes has other things to do, so all its findings are only logged, too.
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
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.key import checked_name, key_of
from celery_singleton_lock.leases.lease import new_token
from celery_singleton_lock.options import OPTIONS, check_setting, check_value, prefix_of
from celery_singleton_lock.own_process import (
    check_beat_process,
    check_ending,
    check_publishing_process,
    check_worker_process,
)
from celery_singleton_lock.settings import open_store
from celery_singleton_lock.spelling import check_setting_names
from celery_singleton_lock.stores.base import lock_name_of

logger = logging.getLogger("celery_singleton_lock")

BOUND = 1.0
"""Seconds for which a start waits for the store."""

Question = Callable[[], object]
"""Something that raises a `ConfigurationError` if it cannot work."""

# With the commands of operators, who look after other locks while a task cannot work; `doctor` tells of it.
_CHECKED_COMMANDS = ("worker", "beat", "singleton")
_looked_at: WeakKeyDictionary[Celery, object] = WeakKeyDictionary()
_has_worker: WeakKeyDictionary[Celery, bool] = WeakKeyDictionary()
_marks_in_memory: WeakKeyDictionary[Celery, bool] = WeakKeyDictionary()
_held_back: WeakKeyDictionary[Celery, list[ConfigurationError]] = WeakKeyDictionary()


@contextmanager
def faults_held_back(app: Celery) -> Iterator[None]:
    """Keep the fault of a definition, if this process will tell it with all other faults and then end.

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
    _has_worker[app] = True
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
    # If it is inside a worker, the worker has checked its tasks and the store already.
    rest = _about(app, tasks) if _is_first_look(app) else []
    if _tell_faults([*_about_beat(app, tasks, key, *questions), *rest]):
        _end()


def check_definitions(app: Celery) -> None:
    """Return if a beat of another library has only tasks that can work; the other checks do not concern it.

    Raises:
        SystemExit: It has others; the log says which.
    """
    if app in _held_back and _tell_faults(_about_definitions(app, lockable(app))):
        _end()


def check_publisher(task: Task) -> None:
    """Log it, soon and once, if a process that publishes this task cannot work as it should."""
    app = task.app
    if app in _looked_at or app.conf.task_always_eager or not _is_first_look(app):
        return
    # Do not make Celery define all tasks now.
    tasks = lockable(app) if app.finalized else _lockable([task])
    background.submit(partial(_tell_faults, _about(app, tasks)))


def check_marks_in_memory(task: Task) -> None:
    """Log it, soon and once, if this process marks calls as queued in its own memory, for workers elsewhere."""
    app = task.app
    if app not in _has_worker and not app.conf.task_always_eager and app not in _marks_in_memory:
        _marks_in_memory[app] = True
        background.submit(partial(_tell_faults, [partial(check_publishing_process, app, task)]))


# For callers that report the faults themselves.


def lockable(app: Celery) -> list[Any]:
    """The tasks of *app* that this library locks, in the order of their names."""
    return _lockable(app.tasks.values())


def faults_of(app: Celery) -> list[str]:
    """The faults in the settings of *app* and in its tasks that can never work."""
    return _faults_in(_about_tasks(app, lockable(app)))


def faults_with(app: Celery, pool: type, queues: Container[str]) -> list[str]:
    """The faults that can never work in a worker with that pool, which takes messages from those *queues*."""
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
    """Whether this process looks for the first time; its children inherit the answer."""
    mine = object()
    return _looked_at.setdefault(app, mine) is mine


def _lockable(tasks: Iterable[Any]) -> list[Any]:
    ours = [task for task in tasks if hasattr(type(task), "is_lockable") and task.is_lockable()]
    # Celery keeps them in no order, but the same faults should give the same lines.
    return sorted(ours, key=lambda task: task.name)


def _about(app: Celery, tasks: list[Any]) -> list[Question]:
    """The checks of those tasks, wherever they are published or run."""
    if not tasks:
        return []
    # Use a name that tasks use, because the rights of a user may depend on it.
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
    """The checks of a worker with that pool; if its queues are not known, they are those of this process."""
    return [
        partial(check_worker_process, app, pool),
        *(partial(check_ending, app, task, pool, queues) for task in tasks),
    ]


def _about_beat(app: Celery, tasks: list[Any], *questions: Any) -> list[Question]:
    """The further checks of a beat; none without questions, because then there is no beat."""
    if not questions:
        return []
    of_beat = [*questions, partial(check_beat_process, app)]
    if tasks:
        return of_beat
    key = questions[0]
    return [partial(check_setting_names, app), *of_beat, partial(_check_store, app, lambda: lock_name_of(key()))]


def _about_definitions(app: Celery, tasks: list[Any]) -> list[Question]:
    """Check each option by itself, because the first fault of a task must not hide the others."""
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
    """Log each fault in a line of its own; returns whether there was one."""
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
        logger.exception("lock.unchecked: a part of the check has failed, and the rest continues")
    return ""


def _end() -> NoReturn:
    # Not the error itself, because Celery would add a traceback of thirty lines, which would hide these lines.
    raise SystemExit(EX_FAILURE)


def _check_store(app: Celery, lock_name: Callable[[], str], tasks: Iterable[Any] = ()) -> None:
    """Log it if there is no answer, because a store may come back.

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
            "singleton_lock_url; until it answers, lock_on_store_error decides what happens to each task"
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
