"""Checks that refuse a task when it is made, and end a worker or a beat before its first task."""

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakSet

import click
from celery import Celery, Task
from celery.app.annotations import _first_match_any
from celery.platforms import EX_FAILURE
from celery.utils.imports import symbol_by_name

from celery_singleton_lock.definition import keys, options, settings
from celery_singleton_lock.errors import ConfigurationError, StoreError
from celery_singleton_lock.log import log
from celery_singleton_lock.runs.endings import why_unreadable
from celery_singleton_lock.stores.records import new_token
from celery_singleton_lock.stores.redis.inventory import TRIAL, Inventory

BOUND = 1.0
"""Seconds for which a start waits for the store."""
_CHECKED_COMMANDS = ("worker", "beat", "singleton")
_CELERYS_POOLS = tuple(f"celery.concurrency.{name}" for name in ("prefork", "thread", "solo", "gevent", "eventlet"))
_NOT_OF_CELERY = (
    "the pool {} is not one of Celery's; it may run tasks without Celery's request, and so without the lock. "
    "Start the worker with --pool prefork, threads, solo, gevent or eventlet, or with an app that has no locked tasks "
    "such as {}"
)
_checked: WeakSet[Celery] = WeakSet()


def check_definition(cls: type[Any], name: str) -> None:
    # `cls()` would run the user's `__init__`.
    task = object.__new__(cls)
    vars(task)["name"] = name
    options.refuse([*_faults_in_task(task), *options.values_of(task)[1]])


def options_of(task: Any) -> options.LockOptions:
    values, faults = options.values_of(task, task.app)
    is_joined = values.get("on_conflict") == "join" and values.get("mode") == "while_executing"
    if is_joined and (why := why_unreadable(task)):
        faults.append(f"task {task.name}: lock_on_conflict='join' needs the holder's result, and {why}")
    # Check the class again: Celery registers a task before its first check, so a refused task can still be called.
    found = [*settings.faults_in_settings(task.app), *_faults_in_task(task), *faults]
    options.refuse(options.as_set(task.app, fault) for fault in found)
    log.shows_labels = options.logs_labels(task.app) or log.shows_labels
    timeout = options.visibility_timeout_of(task.app)
    return options.LockOptions(
        **values,
        prefix=options.prefix_of(task.app),
        visibility_timeout=timeout,
        redelivered_within=timeout + options.SWEEP,
        unique_in_queue=values["mode"] != "while_executing",
        newest_wins=values["on_conflict"] in ("rerun", "replace"),
        kills=values["on_lost"] == "kill" and values["mode"] != "until_executing",
        skip_result=options.option_of(task, "skip_result", options.UNSET),
        holder_name="" if options.option_of(task, "name") is None else task.name,
    )


def request_class_of(task: Any) -> type[Any]:
    """Our request class. If the task or another base defines a `Request`, a class that inherits from both."""
    ours = options.base_in(task.__class__)
    written = [vars(each)["Request"] for each in (task, *task.__class__.__mro__) if "Request" in vars(each)]
    theirs = next((each for each in written if each not in (ours.Request, Task.Request)), ours.Request)
    request = symbol_by_name(ours.Request)
    given = symbol_by_name(theirs)
    return given if issubclass(given, request) else type("Request", (request, given), {})


def is_checked_at_start(app: Celery) -> bool:
    """Whether this process will check all tasks at its start. An error before that would show only the first fault."""
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().invoked_subcommand in _CHECKED_COMMANDS and app not in _checked


def _faults_in_task(task: Any) -> Iterator[str]:
    cls = task.__class__
    ours = options.base_in(cls)
    yield from settings.faults_in_names(task)
    if cls.Strategy != Task.Strategy:
        yield (
            f"task {task.name}: its Strategy, {cls.Strategy!r}, is not Celery's, so a worker would run its messages "
            f"in a way of its own and take no lock; remove {ours.__name__}, or the base class that sets the Strategy"
        )
    for base in (each for each in cls.__mro__[: cls.__mro__.index(ours)] if "__call__" in vars(each)):
        code = getattr(inspect.unwrap(vars(base)["__call__"]), "__code__", None)
        if code is None or not {"super", "__call__"} <= _names_in(code):
            yield (
                f"task {task.name}: {base.__qualname__}.__call__ never calls super().__call__(), so it would bypass "
                "the lock; write `return super().__call__(*args, **kwargs)` where it runs the body, or put "
                f"{ours.__name__} first among the base classes"
            )
    try:
        keys.KeyMaker(task)
    except ConfigurationError as error:
        yield str(error)


def _names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def check_worker(app: Celery, pool: type) -> None:
    for text in without_base(app):
        log.warning("lock.no_base", "%s", text)
    _checked.add(app)
    if options.lockable(app):
        faults = faults_with(app, kind_of(pool), app.amqp.queues.consume_from) + faults_of(app)
        _end_if_faulty(faults + _faults_in(app, partial(_check_store, app)))
    for text in never_awaited(app):
        log.warning("lock.async_body", "%s", text)


def check_beat(app: Celery, *, has_lease: bool) -> None:
    """End a beat that cannot work. For a scheduler of Celery's own, without a lease, check only the tasks' classes."""
    tasks = options.lockable(app)
    _checked.add(app)
    if not has_lease:
        _end_if_faulty(_faults_in(app, *(partial(check_definition, task.__class__, task.name) for task in tasks)))
        return
    why = "each beat would lead with locks of its own"
    remedy = "start a single beat with a scheduler of Celery's own, such as celery.beat:PersistentScheduler"
    in_memory = partial(_refuse_memory, app, why, remedy)
    _end_if_faulty(faults_of(app) + _faults_in(app, in_memory, partial(_check_store, app)))


def never_awaited(app: Celery) -> list[str]:
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    return [
        f"task {task.name} is an `async def` or a generator, whose work would begin after the "
        "lock is released, so each run fails; write a `def` with `return asyncio.run(work())`"
        for task in options.lockable(app)
        if options.option_of(task, "mode") != "until_executing"
        and any(is_kind(inspect.unwrap(task.run)) for is_kind in kinds)
    ]


def without_effect(task: Any) -> list[str]:
    chosen: options.LockOptions = task.lock_options
    policy = f"lock_on_conflict={chosen.on_conflict!r}"
    waits = chosen.on_conflict in ("reschedule", "wait") or (chosen.newest_wins and chosen.unique_in_queue)
    keeps_marks = chosen.unique_in_queue or chosen.newest_wins or chosen.on_conflict == "join"
    skips = chosen.on_conflict in ("skip", "rerun", "replace") or chosen.on_store_error == "skip"
    # In a queue mode, a call that is not sent may end with `lock_skip_result`.
    skips = skips or (chosen.unique_in_queue and chosen.on_conflict != "raise")
    beside = {
        "wait_timeout": "" if waits else f"{policy}, with which no call waits for the lock",
        "skip_result": "" if skips else f"{policy}, with which no call is skipped",
        "queue_ttl": "" if keeps_marks else f"lock_mode={chosen.mode!r}, in which no call counts as queued",
        "min_hold_on_failure": "" if chosen.min_hold else "no lock_min_hold",
    }
    own = [name for name in beside if options.option_of(task, name) is not None]
    return [f"lock_{name} beside {beside[name]}" for name in own if beside[name]]


def without_base(app: Celery) -> list[str]:
    found = []
    # An annotation of "*" also reaches tasks that want no lock.
    of_all = _first_match_any(app.annotations) or {}
    for task in sorted(app.tasks.values(), key=lambda task: task.name):
        names = [name for name in sorted(options.NAMES) if name not in of_all and hasattr(task.__class__, name)]
        if names and not isinstance(task, options.Lockable):
            found.append(
                f"task {task.name} has {', '.join(names)} and no base=SingletonTask, so it runs "
                "without a lock; write `@app.task(base=SingletonTask, ...)`"
            )
    return found


def faults_of(app: Celery) -> list[str]:
    # Check a beat's settings, too: a worker may embed the beat.
    of_beat = partial(keys.beat_key_of, app), partial(options.beat_ttl_of, app)
    of_tasks = [partial(getattr, task, "lock_options") for task in options.lockable(app)]

    def of_settings() -> None:
        # A function, so that `_faults_in` catches the error of a lazy value.
        options.refuse([*settings.faults_in_settings(app), *options.values_of(options.Lockable(), app)[1]])

    return _faults_in(app, of_settings, partial(options.logs_labels, app), *of_beat, *of_tasks)


def faults_with(app: Celery, pool: str, queues: Container[str]) -> list[str]:
    if pool not in _CELERYS_POOLS:
        return [_NOT_OF_CELERY.format(pool, task.name) for task in options.lockable(app)[:1]]
    if pool != "celery.concurrency.prefork":
        return _faults_in(app, *(partial(_check_kill, app, task, queues) for task in options.lockable(app)))
    why = "the processes of the pool 'prefork' would each have their own"
    remedy = "start the worker with --pool threads, solo, gevent or eventlet"
    return _faults_in(app, partial(_refuse_memory, app, why, remedy))


def try_store(app: Celery, bound: float) -> None:
    """Try the store with a key that nobody else uses; `StoreError` after *bound* seconds."""
    # Open another store: pool processes would inherit the connections of the app's own.
    with closing(settings.open_store(app)) as store:
        if not store.is_of_one_process:
            Inventory(store).self_test(trial_key(app), bound)


def trial_key(app: Celery) -> str:
    """A key that nobody else uses."""
    # Use a task's name: the store's user may have no rights on other keys.
    names = (name for name in map(keys.lock_name_of_task, options.lockable(app)) if isinstance(name, str))
    name = keys.checked_name(next(names, keys.BEAT))
    return f"{keys.start_of_keys(options.prefix_of(app))}{name}:{TRIAL}{new_token()}}}"


def kind_of(pool: type) -> str:
    """The module of Celery's pool. A pool with an `apply_async` or `on_apply` of its own is not Celery's."""
    # Compare names: importing Celery's pools would load gevent and eventlet.
    for cls in getattr(pool, "__mro__", ()):
        if cls.__module__ in _CELERYS_POOLS:
            return str(cls.__module__)
        if vars(cls).keys() & {"apply_async", "on_apply"}:
            break
    return f"{pool!r:.100}"


def _refuse_memory(app: Celery, why: str, remedy: str) -> None:
    url = options.setting(app, "singleton_lock_url")
    if isinstance(url, str) and url.startswith("memory:"):
        fault = f"singleton_lock_url={url!r} keeps locks in the memory of one process, and {why}"
        raise ConfigurationError(f"{fault}; give the URL of a server, such as 'redis://localhost:6379/0', or {remedy}")


def _check_kill(app: Celery, task: Any, queues: Container[str]) -> None:
    if task.lock_options.kills and ((queue := queue_of(app, task)) is None or queue in queues):
        raise options.no_process_for(task.name)


def queue_of(app: Celery, task: Any) -> str | None:
    """The queue of the task's calls; None if a router has to see the call."""
    try:
        route = app.amqp.router.lookup_route(task.name, (), {}, {}, task) or {}
    except Exception:  # noqa: BLE001 (a user's router may raise anything)
        return None
    by_route = route if isinstance(route, str) else route.get("queue")
    queue = getattr(task, "queue", None) or by_route or app.conf.task_default_queue
    return str(getattr(queue, "name", queue))


def _check_store(app: Celery) -> None:
    try:
        try_store(app, BOUND)
    except StoreError as error:
        # `StoreRefused`, a `ConfigurationError`, ends the start: another try would fail, too.
        if isinstance(error, ConfigurationError):
            raise
        text = (
            "acquire, wake-up and release did not work within %g s (%s); start the store, or correct %s; until then, "
            "lock_on_store_error decides what happens to each task"
        )
        told = text, BOUND, error.problem, options.as_set(app, "singleton_lock_url")
        log.error("lock.store_unreachable", *told, store=error.store)


def _faults_in(app: Celery, *checks: Callable[[], object]) -> list[str]:
    faults = dict[str, None]()
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            faults.update(dict.fromkeys(options.as_set(app, str(error)).splitlines()))
        except Exception:  # noqa: BLE001 (it is logged)
            log.error("lock.check_failed", "a part of the check has failed, and the rest continues", exc_info=True)
    return list(faults)


def _end_if_faulty(faults: list[str]) -> None:
    for fault in dict.fromkeys(faults):
        log.critical("lock.misconfigured", "%s", fault)
    if faults:
        # Celery would log a traceback for another error.
        raise SystemExit(EX_FAILURE)
