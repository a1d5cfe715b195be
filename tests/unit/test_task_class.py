"""A task that lacks the class which the app has for its tasks: the line to write is told, once."""

from typing import Any

import pytest
from celery import Celery, Task

from celery_singleton_lock import SingletonTask

DJANGO = "celery.contrib.django.task:DjangoTask"


class FlaskTask(Task):
    """As in Flask's documentation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Both(SingletonTask, FlaskTask):
    abstract = True


def body() -> None: ...


def define(app: Celery, name: str = "body", **options: Any) -> None:
    # Its name is asked for, so it exists.
    assert app.task(name=name, shared=False, **options)(body).name == name


def app_with(task_cls: Any) -> Celery:
    return Celery("shop", task_cls=task_cls, set_as_current=False)


@pytest.mark.parametrize(("task_cls", "name"), [(DJANGO, "DjangoTask"), (FlaskTask, "FlaskTask")])
def test_a_task_without_the_class_of_its_app_is_told_the_line_to_write(task_cls: Any, name: str) -> None:
    with pytest.warns(UserWarning, match="lacks") as told:
        define(app_with(task_cls), base=SingletonTask)

    (text,) = [str(each.message) for each in told]
    assert text.startswith("task body lacks ")
    assert (told[0].filename, told[0].lineno) == (__file__, body.__code__.co_firstlineno)
    assert f"`class Base(SingletonTask, {name}): abstract = True` and `@app.task(base=Base)`" in text


def both_bases() -> list[type]:
    class OfTheApp(SingletonTask, app_with(FlaskTask).Task):  # type: ignore[misc]
        abstract = True

    return [Both, OfTheApp]


@pytest.mark.parametrize("base", [*both_bases(), FlaskTask, Task, None], ids=lambda base: getattr(base, "__name__", ""))
def test_other_tasks_are_told_nothing(base: Any) -> None:
    define(app_with(FlaskTask), base=base)
