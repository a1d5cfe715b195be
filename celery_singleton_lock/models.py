"""The arguments of the body of a task with `pydantic=True`: models, made from the message."""

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from celery.app import base

from celery_singleton_lock.guard import body_in
from celery_singleton_lock.leases.key import Receive

# The name that Celery's wrapper has for the body that it wraps.
_BODY = "task_fun"


def receiver_of(cls: type[Any], signature: inspect.Signature) -> Receive | None:
    """A function that turns the arguments of a call into those that the body receives; None if they are the same.

    It runs the code of the models, and raises their errors.
    """
    run = body_in(cls)
    itself = () if isinstance(run, staticmethod) else (None,)
    wrapper: Any = run.__func__ if isinstance(run, staticmethod) else run
    if getattr(wrapper, "__globals__", None) is not vars(base) or _BODY not in wrapper.__code__.co_freevars:
        return None
    bodiless = _bodiless(wrapper)
    parameters = signature.parameters.values()
    positions = [each.name for each in parameters if each.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}

    def receive(args: Any, kwargs: Any) -> tuple[Any, Any]:
        positional, by_name = bodiless(*itself, *args, **kwargs)
        received = signature.bind(*positional[len(itself) :], **by_name).arguments
        # By position or by name, as they were passed, because a callable in `lock_key` takes them like this.
        passed = [received[name] for name, _ in zip(positions, args, strict=False)]
        named = {name: received[name] if name in names else value for name, value in kwargs.items()}
        return [*passed, *args[len(positions) :]], named

    return receive


def _bodiless(wrapper: FunctionType) -> Callable[..., Any]:
    """Celery's wrapper, but it returns the arguments for the body. Only the wrapper knows how strictly it validates."""
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    cells[_BODY] = CellType(lambda *args, **kwargs: (args, kwargs))
    return FunctionType(wrapper.__code__, wrapper.__globals__, closure=tuple(cells.values()))
