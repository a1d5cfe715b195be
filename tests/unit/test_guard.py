"""A `__call__` of the user's before ours leads through the lock, or the task does not run."""

from collections.abc import Callable
from functools import partialmethod, wraps
from typing import Any

import pytest
from celery import Celery, Task
from celery.contrib.django.task import DjangoTask

from celery_singleton_lock import ConfigurationError, SingletonTask
from tests.unit.conftest import refused


def make(app: Celery, base: type, **options: Any) -> Any:
    @app.task(base=base, name="shop.tasks.sync", bind=True, shared=False, **options)
    def sync(self: Any, x: Any = 0) -> Any:
        return x or self.lock.held

    app.finalize()
    return app.tasks["shop.tasks.sync"]


class Run(Task):
    """As Flask's documentation has it."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class TaskBase(Task):
    """As older recipes for Flask have it."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Task.__call__(self, *args, **kwargs)


class Unknown:
    """Its `__call__` is a descriptor that nobody can look into."""

    class Descriptor:
        def __get__(self, task: Any, owner: Any) -> Any:
            return task.run

    __call__ = Descriptor()


class Partial:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    __call__ = partialmethod(call)


@pytest.mark.parametrize("mixin", [Run, TaskBase, Unknown, Partial], ids=lambda each: each.__name__)
def test_what_names_no_call_of_the_next_class_is_refused_with_the_line_to_write(app: Celery, mixin: Any) -> None:
    class Base(mixin, SingletonTask):  # type: ignore[misc]
        abstract = True

    line = "write `return super().__call__(*args, **kwargs)`"
    with refused("task shop.tasks.sync", f"{mixin.__name__}.__call__", line, "put SingletonTask first"):
        make(app, Base)


def timed(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def around(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return around


class Wrapped:
    @timed
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


@pytest.mark.parametrize("mixin", [Wrapped, DjangoTask])
def test_a_call_of_the_next_class_is_seen_through_a_wrapper(app: Celery, mixin: Any) -> None:
    class Base(mixin, SingletonTask):  # type: ignore[misc]
        abstract = True

    assert make(app, Base).apply().get() is True


class Branches(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        way = self.app.conf.get("way")
        if way == "run":
            return self.run(*args, **kwargs)
        if way == "Task":
            return Task.__call__(self, *args, **kwargs)
        return super().__call__(*args, **kwargs)


class BothWays(Branches, SingletonTask):
    abstract = True


@pytest.mark.parametrize("way", ["", "run", "Task"])
def test_a_direct_call_needs_no_lock(app: Celery, way: str) -> None:
    task = make(app, BothWays)
    app.conf.way = way

    assert task(7) == 7


class Batches(Task):
    """As celery-batches has it: a worker collects the messages, and calls `run`."""

    abstract = True

    def Strategy(self, *_: Any) -> Any:  # noqa: N802 (Celery's name)
        raise AssertionError


class Batched(SingletonTask, Batches):
    abstract = True


class Replaced(SingletonTask):
    abstract = True
    Strategy = "shop.strategy:own"


@pytest.mark.parametrize("base", [Batched, Replaced])
def test_a_strategy_that_takes_the_messages_past_the_lock_is_refused(app: Celery, base: type) -> None:
    with pytest.raises(ConfigurationError, match=r"task shop\.tasks\.sync: its Strategy, .* is not Celery's"):
        make(app, base)
