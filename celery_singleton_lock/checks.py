"""What can never work: said when a task is made, and before the first task of a process.

What can never work ends a worker or a beat. A store that is away may come back, so it is only logged. A process that
publishes has other things to do, so all its findings are only logged, too.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import click
from celery import Celery, Task
from celery.platforms import EX_FAILURE
from celery.utils.imports import symbol_by_name

from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.keys import key_maker_of
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.key import checked_name, key_of
from celery_singleton_lock.leases.lease import new_token
from celery_singleton_lock.options import (
    NAMES,
    OPTIONS,
    LockOptions,
    as_written,
    check_pair,
    faults_in_defaults,
    faults_in_names,
    faults_in_settings,
    faults_in_values,
    option_of,
    prefix_of,
    refuse,
    resolve,
)
from celery_singleton_lock.runs.endings import why_unreadable
from celery_singleton_lock.runs.run import kills_itself
from celery_singleton_lock.settings import open_store
from celery_singleton_lock.stores.base import lock_name_of

logger = logging.getLogger("celery_singleton_lock")

BOUND = 1.0
"""Seconds for which a start waits for the store."""

Check = Callable[[], object]
"""Something that raises a `ConfigurationError` if it cannot work, with a line for each fault."""

# The commands of operators also work while a task cannot; `doctor` shows the fault.
_CHECKED_COMMANDS = ("worker", "beat", "singleton")
_A_SERVER = "give the URL of a server, such as 'redis://localhost:6379/0'"
_checked: WeakSet[Celery] = WeakSet()
_warned: WeakKeyDictionary[Celery, set[type]] = WeakKeyDictionary()


# When a task is made.


def check_definition(cls: type[Any], ours: type[Any]) -> None:
    """Refuse a class of tasks, which inherits from *ours*, if it cannot work; each fault is a line of the error."""
    refuse(_faults_in_class(cls, ours))


def options_of(task: Any, ours: type[Any]) -> LockOptions:
    """The options of *task*, with the app's settings and the defaults filled in, unless any of it cannot work."""
    # Look at the class again, because Celery keeps a refused task, and gives it to the next caller.
    of_class = [*_faults_in_class(type(task), ours), *_faults_in_options(task)]
    refuse([*faults_in_settings(task.app), *of_class, *_faults_with_app(task)])
    try:
        return resolve(task.app, task)
    except ConfigurationError as error:
        raise ConfigurationError(as_written(task.app, str(error))) from None


def warn_of_task_class(cls: type[Any], app: Celery, ours: type[Any]) -> None:
    """Warn of a task that lacks the class which the app has for its tasks, as Django's and Flask's do."""
    # The bases of a task without a base of its own, except the class that Celery binds to the app.
    wanted = [each for each in app.Task.__mro__ if "_app" not in vars(each)]
    lacking = next((each for each in wanted if each not in cls.__mro__ and not issubclass(ours, each)), None)
    base = next(each for each in cls.__mro__ if "run" not in vars(each))
    if lacking is None or base in _warned.setdefault(app, set()):
        return
    _warned[app].add(base)
    bases = lacking.__name__ if issubclass(lacking, ours) else f"{base.__name__}, {lacking.__name__}"
    text = (
        f"task {cls.name} lacks {lacking.__module__}.{lacking.__qualname__}, which app {app.main!r} has for its tasks; "
        f"write `class Base({bases}): abstract = True` and `@app.task(base=Base)`"
    )
    # The line of the task, because its user can do nothing at ours.
    warnings.warn_explicit(text, UserWarning, *_place_of(cls))


def _place_of(task: Any) -> tuple[str, int]:
    """File and line of the body of a task, or of a class of tasks."""
    code = getattr(inspect.unwrap(task.run), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else (task.__module__, 0)


def request_class_of(task: Any, ours: type[Any]) -> type[Any]:
    """The class of the task's requests: that of *ours*, joined with the class of the user or of a base."""
    written = [vars(each)["Request"] for each in (task, *type(task).__mro__) if "Request" in vars(each)]
    theirs = next((each for each in written if each not in (ours.Request, Task.Request)), None)
    request: type[Any] = symbol_by_name(ours.Request)
    if theirs is None:
        return request
    try:
        given: type[Any] = symbol_by_name(theirs)
        return given if issubclass(given, request) else type("Request", (request, given), {})
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"task {task.name}: Request={theirs!r} cannot be joined with that of {ours.__name__} ({error}); derive it "
            "from celery.worker.request.Request"
        ) from error


def is_checked_at_start(app: Celery) -> bool:
    """This process will name the faults of all tasks at once and then end.

    Celery makes the tasks of a worker and of a beat before there is a log, and would show a traceback of the first.
    """
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().invoked_subcommand in _CHECKED_COMMANDS and app not in _checked


def _faults_in_class(cls: type[Any], ours: type[Any]) -> Iterator[str]:
    yield from _faults_in_call_order(cls, ours)
    yield from faults_in_names(cls, ours)
    yield from _faults_in_options(cls)


def _faults_in_call_order(cls: type[Any], ours: type[Any]) -> Iterator[str]:
    """A `__call__` before ours that never calls that of the next class, so that the lock would be off."""
    for base in cls.__mro__[: cls.__mro__.index(ours)]:
        call = vars(base).get("__call__")
        code = getattr(inspect.unwrap(call), "__code__", None) if call is not None else None
        if call is not None and not (code is not None and {"super", "__call__"} <= _names_in(code)):
            yield (
                f"task {cls.name}: {base.__qualname__}.__call__ never calls super().__call__(), so it would bypass the "
                "lock; write `return super().__call__(*args, **kwargs)` where it runs the body, or put "
                f"{ours.__name__} first among the base classes"
            )


def _names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _faults_in_options(task: Any) -> Iterator[str]:
    yield from faults_in_values(task)
    try:
        key_maker_of(task)
    except ConfigurationError as error:
        yield str(error)


def _faults_with_app(task: Any) -> Iterator[str]:
    """What does not go together, wherever it is set."""
    on_conflict = _of_task(task, "on_conflict")
    try:
        check_pair(task, option_of(task, "mode"), on_conflict)
    except ConfigurationError as error:
        yield as_written(task.app, str(error))
    else:
        why = why_unreadable(task) if on_conflict == "join" else ""
        if why:
            yield f"task {task.name}: lock_on_conflict='join' needs the holder's result, and {why}"


# Before the first task of a process.


def check_worker(app: Celery, pool: type, *of_beat: Any) -> None:
    """End a worker that cannot work with that pool, or with its beat, whose checks begin with its key."""
    for text in without_base(app):
        logger.warning("lock.no_base: %s", text)
    # Its pool processes inherit this, and with its beat they need not look again.
    _checked.add(app)
    tasks = lockable(app)
    checks = [*_checks_for_pool(app, tasks, pool), *_checks_for(app, tasks), *_checks_for_beat(app, tasks, *of_beat)]
    _end_if_faulty(app, checks)


def check_beat(app: Celery, key: Callable[[], str], *checks: Check) -> None:
    """End a beat that leads by *key* and cannot work, or fails those *checks*; the log says why."""
    tasks = lockable(app)
    # If it is inside a worker, the worker has checked its tasks and the store already.
    rest = [] if app in _checked else _checks_for(app, tasks)
    _checked.add(app)
    _end_if_faulty(app, [*_checks_for_beat(app, tasks, key, *checks), *rest])


def check_definitions(app: Celery) -> None:
    """End a beat of another library if its tasks cannot work; the other checks do not concern it."""
    if app not in _checked:
        _end_if_faulty(app, [task.check_class for task in lockable(app)])


def check_publisher(task: Task) -> None:
    """Log it, soon and once, if a process that publishes this task cannot work as it should."""
    app = task.app
    if app in _checked or app.conf.task_always_eager:
        return
    _checked.add(app)
    # Do not make Celery define all tasks now.
    tasks = lockable(app) if app.finalized else _lockable([task])
    checks: list[Check] = [*_checks_for(app, tasks), *(partial(_check_marks, app, each) for each in tasks)]
    background.submit(partial(_log_faults, app, checks))


# For callers that show the faults themselves.


def lockable(app: Celery) -> list[Any]:
    """The tasks of *app* that this library locks, in the order of their names."""
    return _lockable(app.tasks.values())


def without_base(app: Celery) -> list[str]:
    """The tasks of *app* that have options of this library, and run without a lock."""
    found = []
    for task in sorted(app.tasks.values(), key=lambda task: task.name):
        options = [name for name in sorted(NAMES) if hasattr(type(task), name)]
        if options and not hasattr(type(task), "is_lockable"):
            file, line = _place_of(task)
            found.append(
                f"task {task.name} ({file}:{line}) has {', '.join(options)} and no base=SingletonTask, so it runs "
                "without a lock; write `@app.task(base=SingletonTask, ...)`"
            )
    return found


def faults_of(app: Celery) -> list[str]:
    """The faults in the settings of *app* and in its tasks that can never work."""
    return _faults_in(app, _checks_for_tasks(app, lockable(app)))


def faults_with(app: Celery, pool: type, queues: Container[str]) -> list[str]:
    """The faults that can never work in a worker with that pool, which takes messages from those *queues*."""
    return _faults_in(app, _checks_for_pool(app, lockable(app), pool, queues))


def try_store(app: Celery, bound: float) -> None:
    """Do all that a run and a waiter do, within *bound* seconds.

    Raises:
        ConfigurationError: There is no store to use, or it does not let us.
        StoreError: Not all of it was answered in time.
    """
    tasks = lockable(app)
    _try(app, partial(_name_in_use, tasks), tasks, bound)


def _lockable(tasks: Iterable[Any]) -> list[Any]:
    ours = [task for task in tasks if hasattr(type(task), "is_lockable") and task.is_lockable()]
    # Celery keeps them in no order, but the same faults should give the same lines.
    return sorted(ours, key=lambda task: task.name)


def _checks_for(app: Celery, tasks: list[Any]) -> list[Check]:
    """The checks of those tasks, wherever they are published or run."""
    if not tasks:
        return []
    # Use a name that tasks use, because the rights of a user may depend on it.
    return [*_checks_for_tasks(app, tasks), partial(_check_store, app, partial(_name_in_use, tasks), tasks)]


def _checks_for_tasks(app: Celery, tasks: list[Any]) -> list[Check]:
    return [partial(_check_settings, app), *(partial(getattr, task, "lock_options") for task in tasks)]


def _check_settings(app: Celery) -> None:
    refuse([*faults_in_settings(app), *faults_in_defaults(app)])


def _checks_for_pool(app: Celery, tasks: list[Any], pool: type, queues: Container[str] | None = None) -> list[Check]:
    """The checks of a worker with that pool; if its queues are not known, they are those of this process."""
    return [
        partial(_check_pool, app, pool),
        *(partial(_check_kill, app, task, pool, queues) for task in tasks),
    ]


def _checks_for_beat(app: Celery, tasks: list[Any], *checks: Any) -> list[Check]:
    """The further checks of a beat; none without its own, because then there is no beat."""
    if not checks:
        return []
    of_beat = [*checks, partial(_check_beat_process, app)]
    if tasks:
        return of_beat
    key = checks[0]
    return [partial(_check_settings, app), *of_beat, partial(_check_store, app, lambda: lock_name_of(key()))]


def _check_pool(app: Celery, pool: type) -> None:
    if _is_in_memory(app) and _is_prefork(pool):
        raise _of_one_process(
            app,
            "the processes of the pool 'prefork' would each have their own",
            f"{_A_SERVER}, or start the worker with --pool threads, solo, gevent or eventlet",
        )


def _check_beat_process(app: Celery) -> None:
    # It has a process of its own also inside a worker.
    if _is_in_memory(app):
        raise _of_one_process(
            app,
            "each beat would lead with locks of its own",
            f"{_A_SERVER}, or start a single beat with a scheduler of Celery's own, such as "
            "celery.beat:PersistentScheduler",
        )


def _check_marks(app: Celery, task: Any) -> None:
    broker = app.conf.broker_write_url or app.conf.broker_url or ""
    first = broker if isinstance(broker, str) else str([*broker, ""][0])
    if _is_in_memory(app) and task.lock_options.unique_in_queue and not first.startswith("memory:"):
        raise _of_one_process(
            app,
            f"the workers are others, so a call of {task.name} counts as queued here for long after it has run",
            _A_SERVER,
        )


def _check_kill(app: Celery, task: Any, pool: type, queues: Container[str] | None) -> None:
    # Workers with other pools may take the queue of such a task.
    kills_itself(task, task.lock_options, has_process=_is_prefork(pool) or not _comes_here(app, task, queues))


def _comes_here(app: Celery, task: Any, queues: Container[str] | None) -> bool:
    """The worker takes messages from the queue of the task, as far as can be known before there is a call."""
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


def _of_task(task: Any, name: str) -> Any:
    """The value of an option, whether it is allowed or not."""
    own = option_of(task, name)
    return task.app.conf.get(f"singleton_lock_{name}", OPTIONS[name].default) if own is None else own


def _name_in_use(tasks: list[Any]) -> str:
    names = (option_of(task, "name") or task.name for task in tasks)
    return next((name for name in names if isinstance(name, str)), "start")


def _log_faults(app: Celery, checks: Iterable[Check]) -> bool:
    faults = _faults_in(app, checks)
    for fault in faults:
        logger.critical("lock.misconfigured: %s", fault)
    return bool(faults)


def _faults_in(app: Celery, checks: Iterable[Check]) -> list[str]:
    return list(dict.fromkeys(as_written(app, fault) for check in checks for fault in _faults_of(check)))


def _faults_of(check: Check) -> list[str]:
    try:
        check()
    except ConfigurationError as error:
        return str(error).splitlines()
    except Exception:
        # Of a router, a provider of passwords or a setting of the user's, which may work the next time.
        logger.exception("lock.check_failed: a part of the check has failed, and the rest continues")
    return []


def _end_if_faulty(app: Celery, checks: Iterable[Check]) -> None:
    if _log_faults(app, checks):
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
            "lock.store_unreachable store=%s: acquire, wake-up and release did not work within %g s (%s); "
            "start it, or correct %s; "
            "until it answers, lock_on_store_error decides what happens to each task"
        )
        logger.error(event, error.store, BOUND, error.problem, as_written(app, "singleton_lock_url"))


def _try(app: Celery, lock_name: Callable[[], str], tasks: Iterable[Any], bound: float = BOUND) -> None:
    """With a lock of that name which nobody else can ask for."""
    ttls = [_of_task(task, "ttl") for task in tasks]
    key = key_of(prefix_of(app), checked_name(lock_name()), {"start": new_token()})
    # Connections of its own, which no pool process inherits.
    store = open_store(app)
    try:
        store.self_test(key, bound, [ttl for ttl in ttls if isinstance(ttl, int | float)])
    finally:
        store.close()
