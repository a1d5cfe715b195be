"""Options count wherever they are set: in the class, in one behind ours, on the object; and nowhere else unseen."""

from typing import Any

import pytest
from celery import Celery, Task, group

from celery_singleton_lock import ConfigurationError, SingletonTask
from tests.unit.test_options import ttl_of


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://own"
    return app


def make(app: Celery, base: type = SingletonTask, **options: Any) -> Any:
    @app.task(base=base, name="shop.tasks.sync", shared=False, **options)
    def sync(x: Any, y: Any = 1) -> None: ...

    app.finalize()
    return app.tasks["shop.tasks.sync"]


# Behind ours.


class Defaults:
    lock_ttl = 99
    lock_key = ("x",)
    lock_skip_result = 7


class CompanyTask(Task, Defaults):
    abstract = True


@pytest.mark.parametrize("behind", [Defaults, CompanyTask])
def test_options_of_a_class_behind_ours_count(app: Celery, behind: type) -> None:
    class Base(SingletonTask, behind):  # type: ignore[misc, valid-type]
        abstract = True

    task = make(app, Base)

    assert (task.lock_ttl, ttl_of(task), task.lock_skip_result) == (99, 99, 7)
    assert task.lock_key_for(1, 2) == task.lock_key_for(1, 3)
    assert not hasattr(SingletonTask, "lock_ttl")


# On the object.


@pytest.mark.parametrize(("name", "value"), [("lock_ttl", 0), ("lock_key", ("z",)), ("lock_name", 7)])
def test_a_bad_value_on_the_object_is_refused_with_its_name(app: Celery, name: str, value: Any) -> None:
    task = make(app)
    setattr(task, name, value)

    with pytest.raises(ConfigurationError, match=rf"^task shop.tasks.sync: {name}"):
        task.delay(1)


@pytest.mark.parametrize(("name", "told"), [("lock_tll", "did you mean lock_ttl"), ("once", "of celery-once")])
def test_what_is_no_option_is_refused_on_the_object(app: Celery, name: str, told: str) -> None:
    task = make(app)

    with pytest.raises(ConfigurationError, match=told):
        setattr(task, name, 5)
    assert not hasattr(task, name)


# With a call.


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lock_ttl", r"lock_ttl cannot be given with a call, .*, lock_ttl=\.\.\."),
        ("lock_tll", r"lock_tll cannot be given with a call, .*, lock_ttl=\.\.\."),
        ("lock_zzzzzzzz", r"lock_zzzzzzzz cannot be given with a call, .*, lock_\.\.\.=\.\.\."),
        ("singleton_lock_ttl", r"singleton_lock_ttl cannot be given with a call, .*, lock_ttl="),
        ("once", "once is an option of celery-once"),
    ],
)
def test_an_option_of_a_call_is_refused_in_the_caller(app: Celery, name: str, told: str) -> None:
    task = make(app)

    for publish in (
        lambda: task.apply_async((1,), **{name: 5}),
        lambda: task.s(1).set(**{name: 5}).delay(),
        lambda: group(task.s(1).set(**{name: 5})).delay(),
        lambda: task.apply((1,), **{name: 5}),
    ):
        with pytest.raises(ConfigurationError, match=rf"^task shop\.tasks\.sync: {told}"):
            publish()


# Names that are nearly ours.


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("singleton_lock_ttl", "lock_ttl"),
        ("singleton_lock_mode", "lock_mode"),
        ("singleton_ttl", "lock_ttl"),
        ("on_conflict", "lock_on_conflict"),
        ("skip_result", "lock_skip_result"),
        ("unique_key", "lock_key"),
    ],
)
def test_a_name_that_is_nearly_an_option_is_refused(app: Celery, written: str, meant: str) -> None:
    told = rf"^task shop\.tasks\.sync: there is no option {written}; did you mean {meant}\?"
    with pytest.raises(ConfigurationError, match=told):
        make(app, **{written: 5})


OF_OTHERS = ["unique", "one", "owner", "_lock_ttl", "rate_limit"]


@pytest.mark.parametrize("name", OF_OTHERS)
def test_attributes_of_others_are_left_alone(app: Celery, name: str) -> None:
    assert getattr(make(app, **{name: 5}), name) == 5
