"""A task that lacks the class which the app has for its tasks: the line to write is told, once."""

import warnings
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


def test_a_class_that_was_put_on_the_app_counts_as_well() -> None:
    app = app_with(None)

    class ContextTask(app.Task):  # type: ignore[name-defined, misc]
        """As older recipes do it."""

    app.Task = ContextTask

    with pytest.warns(UserWarning, match="SingletonTask, ContextTask"):
        define(app, base=SingletonTask)


def test_a_task_that_is_a_class_is_told_of_its_base() -> None:
    class Import(SingletonTask):
        name = "import"

        def run(self) -> None: ...

    with pytest.warns(UserWarning, match=r"class Base\(SingletonTask, FlaskTask\)"):
        app_with(FlaskTask).register_task(Import())


def test_it_is_told_once_for_an_app_and_a_class() -> None:
    app = app_with(FlaskTask)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for name in ("one", "two"):
            define(app, name, base=SingletonTask)

    assert len(told) == 1


def both_bases() -> list[type]:
    class OfTheApp(SingletonTask, app_with(FlaskTask).Task):  # type: ignore[misc]
        abstract = True

    return [Both, OfTheApp]


@pytest.mark.parametrize("base", [*both_bases(), FlaskTask, Task, None], ids=lambda base: getattr(base, "__name__", ""))
def test_other_tasks_are_told_nothing(base: Any) -> None:
    define(app_with(FlaskTask), base=base)


@pytest.mark.parametrize("task_cls", [None, Both, SingletonTask])
def test_an_app_without_a_class_of_its_own_is_told_nothing(task_cls: Any) -> None:
    define(app_with(task_cls), base=task_cls or SingletonTask)


def test_the_app_is_not_finalised() -> None:
    app = app_with(FlaskTask)
    with pytest.warns(UserWarning, match="lacks"):
        app._task_from_fun(body, name="body", base=SingletonTask)

    assert not app.finalized
