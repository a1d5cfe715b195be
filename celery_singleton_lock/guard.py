"""The way to the body of a task whose class has a `__call__` before ours: it has to lead through the lock."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

from celery_singleton_lock.errors import ConfigurationError


def check_call_order(cls: type[Any], ours: type[Any]) -> None:
    """Refuse a `__call__` before ours that never calls that of the next class, so that the lock would be off.

    Raises:
        ConfigurationError: Naming the task, the class and the line to write.
    """
    for base in cls.__mro__[: cls.__mro__.index(ours)]:
        call = vars(base).get("__call__")
        if call is not None and not _names_super(call):
            raise _bypassed(cls.name, base, "never calls super().__call__()", ours)


def guard_body(cls: type[Any], ours: type[Any]) -> None:
    """Let the body refuse a run that has come past the lock, for example in one branch of a `__call__` before ours."""
    first = next(each for each in cls.__mro__ if "__call__" in vars(each))
    run = inspect.getattr_static(cls, "run")
    if first is not ours and not isinstance(run, _GuardedBody):
        cls.run = _GuardedBody(run, lambda: _bypassed(cls.name, first, "did not call super().__call__()", ours))


def body_in(cls: type[Any]) -> Any:
    """The body as it stands in the class, without its guard."""
    run = inspect.getattr_static(cls, "run")
    return run.unguarded if isinstance(run, _GuardedBody) else run


class _GuardedBody:
    def __init__(self, unguarded: Any, error: Callable[[], ConfigurationError]) -> None:
        self.unguarded = unguarded
        self._error = error

    def __get__(self, task: Any, owner: Any = None) -> Any:
        run = self.unguarded.__get__(task, owner)
        if task is None:
            return run

        @wraps(run)
        def body(*args: Any, **kwargs: Any) -> Any:
            if task.is_past_lock():
                raise self._error()
            return run(*args, **kwargs)

        return body


def _bypassed(task: str, base: type[Any], what: str, ours: type[Any]) -> ConfigurationError:
    return ConfigurationError(
        f"task {task}: {base.__qualname__}.__call__ {what}, so it would bypass the lock; write "
        f"`return super().__call__(*args, **kwargs)` where it runs the body, or put {ours.__name__} "
        "first among the base classes"
    )


def _names_super(call: Any) -> bool:
    """As far as its names tell, it calls the next class; the guard of the body finds out for certain."""
    code = getattr(inspect.unwrap(call), "__code__", None)
    return code is not None and {"super", "__call__"} <= _names_in(code)


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
