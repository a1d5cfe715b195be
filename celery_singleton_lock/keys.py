"""From a task to the maker of its lock keys, and from a call to the label that operators read beside its key."""

import inspect
import logging
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from celery.app import base
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock.errors import ConfigurationError
from celery_singleton_lock.leases.key import KeyMaker, Receive
from celery_singleton_lock.options import option_of

logger = logging.getLogger("celery_singleton_lock")


def key_maker_of(task: Any) -> KeyMaker:
    """The maker of the lock keys of a task, or of a class of tasks, unless its options cannot work."""
    body = inspect.getattr_static(task if isinstance(task, type) else type(task), "run")
    signature = inspect.signature(getattr(body, "__func__", body))
    if not isinstance(body, staticmethod):
        # Celery leaves `self` on the class.
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    receive = _receiver_of(task, getattr(body, "__func__", body), signature)
    try:
        name = option_of(task, "name")
        return KeyMaker(
            task.name if name is None else name, signature, option_of(task, "key"), receive, option_of(task, "label")
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"task {task.name}: {error}") from None


def _receiver_of(task: Any, body: Any, signature: inspect.Signature) -> Receive | None:
    """With `pydantic=True`, a function that makes the models which the body receives. It runs their code."""
    if getattr(body, "__globals__", None) is not vars(base) or not hasattr(body, "__wrapped__"):
        return None
    from pydantic import TypeAdapter  # noqa: PLC0415 (only such a task needs it, and has it)

    models = {name: TypeAdapter(hint) for name, hint in _hints_of(body.__wrapped__).items() if _is_model(hint)}
    context = {"celery_app": task.app, "celery_task_name": task.name}
    kinds = {name: each.kind for name, each in signature.parameters.items()}
    positions = [name for name, kind in kinds.items() if kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]

    def made(name: str, value: Any) -> Any:
        return models[name].validate_python(value, context=context) if name in models else value

    def receive(args: Any, kwargs: Any) -> tuple[Any, Any]:
        # By position or by name, as they were passed, because a callable in `lock_key` takes them like this.
        passed = [made(name, value) for name, value in zip(positions, args, strict=False)]
        named = {name: made(name, value) if name in kinds else value for name, value in kwargs.items()}
        return [*passed, *args[len(positions) :]], named

    return receive


def _hints_of(body: Any) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(body)
    except (NameError, AttributeError, TypeError):
        return inspect.get_annotations(body)


def _is_model(hint: Any) -> bool:
    """Celery makes models for `Model` and `Model | None` alone."""
    kinds = {hint}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = set(typing.get_args(hint)) - {type(None)}
    (kind, *others) = kinds
    return not others and isinstance(kind, type) and hasattr(kind, "model_validate")


def label_of(task: Any, key: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The label of a call; empty if its task has none, or if it cannot be made, which is logged and costs no call."""
    if task.lock_options.label is None:
        return ""
    try:
        label: str = task._lock_keys.label(args, kwargs)  # noqa: SLF001 (it is this library's)
    except SoftTimeLimitExceeded:
        # This error belongs to the run, so do not hide it.
        raise
    except Exception as error:  # noqa: BLE001 (arguments and their formats are the user's)
        why = f"{type(error).__name__}: {error}"
        logger.warning(
            "lock.label_failed key=%s task_id=%s: lock_label fails for this call (%.200s)", key, task_id, why
        )
        return ""
    return label
