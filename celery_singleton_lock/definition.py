"""What a task's class says of its body, looked at when the task is defined."""

import inspect
from types import CodeType
from typing import Any

from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.options import LockOptions


def run_signature(cls: type[Any]) -> inspect.Signature:
    """Signature of the body without a bound `self`, which Celery leaves on the class."""
    run = inspect.getattr_static(cls, "run")
    if isinstance(run, staticmethod):
        return inspect.signature(run.__func__)
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def check_call_order(cls: type[Any], ours: type[Any]) -> None:
    """Refuse a `__call__` that would run the body past *ours*, as the Flask recipe's does."""
    for base in cls.__mro__[: cls.__mro__.index(ours)]:
        call = base.__dict__.get("__call__")
        code = getattr(inspect.unwrap(call), "__code__", None) if call is not None else None
        if code is not None and "__call__" not in _names_in(code):
            raise ConfigurationError(
                f"task {cls.name}: {base.__qualname__}.__call__ never calls super().__call__(), so it would "
                f"bypass the lock; call it there, or put {ours.__name__} first among the base classes"
            )


def check_policy(task: Any, options: LockOptions) -> None:
    """Refuse a policy that cannot work with the task's results."""
    why = why_unreadable(task) if options.on_conflict == "join" else ""
    if why:
        raise ConfigurationError(f"task {task.name}: lock_on_conflict='join' needs the holder's result, and {why}")


def why_unreadable(task: Any) -> str:
    """Why nobody but its own caller can read a result of the task; empty if everybody can."""
    if isinstance(task.backend, DisabledBackend):
        return "there is no result backend; set app.conf.result_backend"
    if isinstance(task.backend, RPCBackend):
        return "rpc:// gives a result to its caller only; use another result backend"
    return "the task has ignore_result=True, so its holder keeps none" if task.ignore_result else ""


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
