"""Checks of a task's class, its body and its options, when the task is defined."""

import inspect
import warnings
from typing import Any

from celery import Celery, Task
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.utils.imports import symbol_by_name

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.guard import body_in, check_call_order
from celery_singleton_lock.leases.key import KeyMaker
from celery_singleton_lock.models import receiver_of
from celery_singleton_lock.options import LockOptions, check_values, resolve
from celery_singleton_lock.own import own
from celery_singleton_lock.spelling import check_option_names, check_setting_names


def check_definition(cls: type[Any], app: Celery, ours: type[Any]) -> None:
    """Refuse a task whose class cannot work.

    Arguments:
        cls: The task's class.
        app: The task's.
        ours: The class of this library from which it inherits.

    Raises:
        ConfigurationError: Naming the task, what is wrong and what can be done.
    """
    check_call_order(cls, ours)
    _check_task_class(cls, app, ours)
    check_option_names(cls, ours)
    check_values(cls)
    key_maker_of(cls)


def options_of(task: Any, ours: type[Any]) -> LockOptions:
    """The options of *task*, with the app's settings and the defaults filled in.

    Raises:
        ConfigurationError: The class cannot work; a setting does not exist, or has a value that is not allowed; or an
            option cannot work with the task's results.
    """
    # Check it again, because Celery keeps a refused task, and gives it to the next caller.
    check_definition(type(task), task.app, ours)
    check_values(task)
    key_maker_of(task)
    check_setting_names(task.app)
    options = resolve(task.app, task)
    check_results(task, options.on_conflict)
    return options


def key_maker_of(task: Any) -> KeyMaker:
    """The maker of the lock keys of a task, or of a class of tasks.

    Raises:
        ConfigurationError: `lock_name` or `lock_key` cannot work.
    """
    cls = task if isinstance(task, type) else type(task)
    name = task.name if task.lock_name is None else task.lock_name
    signature = _run_signature(cls)
    try:
        return KeyMaker(name, signature, own(task, "lock_key"), receiver_of(cls, signature), task.lock_label)
    except ConfigurationError as error:
        raise ConfigurationError(f"task {task.name}: {error}") from None


def request_class_of(task: Any, ours: type[Any]) -> type[Any]:
    """The class of the task's requests: that of *ours*, joined with the class of the user or of a base.

    Raises:
        ConfigurationError: The two cannot be joined.
    """
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


def _run_signature(cls: type[Any]) -> inspect.Signature:
    """Signature of the body without a bound `self`, which Celery leaves on the class."""
    run = body_in(cls)
    if isinstance(run, staticmethod):
        return inspect.signature(run.__func__)
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _check_task_class(cls: type[Any], app: Celery, ours: type[Any]) -> None:
    """Warn of a task that lacks the class which the app has for its tasks, as Django's and Flask's do."""
    # The bases of a task without a base of its own, except the class that Celery binds to the app.
    wanted = [each for each in app.Task.__mro__ if "_app" not in vars(each)]
    lacking = next((each for each in wanted if each not in cls.__mro__ and not issubclass(ours, each)), None)
    if lacking is None:
        return
    base = next(each for each in cls.__mro__ if "run" not in vars(each))
    bases = lacking.__name__ if issubclass(lacking, ours) else f"{base.__name__}, {lacking.__name__}"
    warnings.warn(
        f"tasks of {base.__module__}.{base.__qualname__} lack {lacking.__module__}.{lacking.__qualname__}, which "
        f"app {app.main!r} has for its tasks: write `class Base({bases}): abstract = True` and `@app.task(base=Base)`",
        stacklevel=2,
    )


def check_results(task: Any, on_conflict: str) -> None:
    """Refuse a policy that cannot work with the task's results."""
    why = why_unreadable(task) if on_conflict == "join" else ""
    if why:
        raise ConfigurationError(f"task {task.name}: lock_on_conflict='join' needs the holder's result, and {why}")


def why_unreadable(task: Any) -> str:
    """Why only its own caller can read a result of the task; empty if every process can."""
    if isinstance(task.backend, DisabledBackend):
        return "there is no result backend; set app.conf.result_backend"
    if isinstance(task.backend, RPCBackend):
        return "rpc:// gives a result to its caller only; use another result backend"
    return "the task has ignore_result=True, so its holder keeps none" if task.ignore_result else ""
