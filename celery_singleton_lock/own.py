"""The places where a task has its options: its class, a class behind ours, or the object."""

from typing import Any

from celery_singleton_lock.options import SingletonOptions

# The attributes of a task that were made from its options.
_MADE = ("lock_options", "_lock_keys")


class _Unless:
    """An option on our class of tasks: the value of a class behind it, which it would hide otherwise, or *value*."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, task: Any, cls: type[Any]) -> Any:
        return getattr(super(self._owner, cls), self._name, self._value)


def unless_behind(value: Any) -> Any:
    """*value*, unless a class behind ours sets the option."""
    return _Unless(value)


def own(task: Any, name: str) -> Any:
    """The value of an option on a task or on a class of tasks; a function there is no method."""
    cls = task if isinstance(task, type) else type(task)
    return getattr(cls, name) if task is cls else vars(task).get(name, getattr(cls, name))


def forget_options(task: Any, name: str) -> None:
    """If *name* is an option, forget everything that was made from the options, so that it is made again."""
    if name in SingletonOptions.__annotations__:
        for made in _MADE:
            vars(task).pop(made, None)
