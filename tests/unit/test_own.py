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


def test_what_stands_before_ours_goes_before_what_stands_behind(app: Celery) -> None:
    class Base(SingletonTask, Defaults):
        abstract = True
        lock_key = None

    task = make(app, Base, lock_ttl=60)

    assert ttl_of(task) == 60
    assert task.lock_key_for(1, 2) != task.lock_key_for(1, 3)


def test_a_function_for_keys_behind_ours_is_no_method(app: Celery) -> None:
    class Keys:
        def lock_key(x: Any, y: Any = 1) -> Any:  # type: ignore[misc]  # noqa: N805
            return x

    class Base(SingletonTask, Keys):  # type: ignore[misc]
        abstract = True

    task = make(app, Base)

    assert task.lock_key_for(1, 2) == task.lock_key_for(1, 3)


def test_a_bad_value_behind_ours_is_refused(app: Celery) -> None:
    class Base(SingletonTask, type("Defaults", (), {"lock_ttl": "soon"})):  # type: ignore[misc]
        abstract = True

    with pytest.raises(ConfigurationError, match="lock_ttl='soon' is not allowed"):
        make(app, Base)


# On the object.


def test_options_of_the_object_count_from_then_on(app: Celery) -> None:
    task = make(app)
    usual = task.lock_key_for(1, 2)

    task.lock_ttl, task.lock_key, task.lock_name = 70, lambda x, y=1: x, "stock"

    assert ttl_of(task) == 70
    assert task.lock_key_for(1, 2) == task.lock_key_for(1, 3) != usual
    assert ":{stock:" in task.lock_key_for(1)


def test_so_do_those_that_the_class_sets_when_it_is_made(app: Celery) -> None:
    class Sync(SingletonTask):
        name = "shop.tasks.sync"

        def __init__(self) -> None:
            self.lock_ttl, self.lock_key = 71, ("x",)
            self.owner = "shop"

        def run(self, x: Any, y: Any = 1) -> None: ...

    task: Any = app.register_task(Sync())

    assert ttl_of(task) == 71
    assert task.lock_key_for(1, 2) == task.lock_key_for(1, 3)


@pytest.mark.parametrize(("name", "value"), [("lock_ttl", 0), ("lock_key", ("z",)), ("lock_name", 7)])
def test_a_bad_value_on_the_object_is_refused_with_its_name(app: Celery, name: str, value: Any) -> None:
    task = make(app)
    setattr(task, name, value)

    with pytest.raises(ConfigurationError, match=rf"^task shop.tasks.sync: {name}"):
        task.delay(1)


def test_an_option_that_is_deleted_from_the_object_is_that_of_the_class_again(app: Celery) -> None:
    task = make(app, lock_ttl=60, lock_key=("x",))
    of_the_class = task.lock_ttl, task.lock_key_for(1)

    task.lock_ttl, task.lock_key = 90, ()
    assert (task.lock_ttl, task.lock_key_for(1)) != of_the_class
    del task.lock_ttl, task.lock_key

    assert (task.lock_ttl, task.lock_key_for(1)) == of_the_class


@pytest.mark.parametrize(("name", "told"), [("lock_tll", "did you mean lock_ttl"), ("once", "of celery-once")])
def test_what_is_no_option_is_refused_on_the_object(app: Celery, name: str, told: str) -> None:
    task = make(app)

    with pytest.raises(ConfigurationError, match=told):
        setattr(task, name, 5)
    assert not hasattr(task, name)


def test_an_attribute_of_ones_own_may_be_set_on_the_object(app: Celery) -> None:
    class Base(SingletonTask):
        abstract = True

        @property
        def lock_owner(self) -> str:
            return self.owner

        @lock_owner.setter
        def lock_owner(self, owner: str) -> None:
            self.owner = owner

    task = make(app, Base)
    task.lock_owner, task.anything, task.ttl = "shop", 5, 6

    assert (task.owner, task.anything, task.ttl) == ("shop", 5, 6)


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


def test_options_of_celery_and_of_others_may_be_given_with_a_call(app: Celery) -> None:
    task = make(app)
    stamped = task.s(1)
    stamped.stamp(lock_owner="shop")

    assert stamped.delay().id
    assert task.apply_async((1,), countdown=1, expires=5, time_limit=5, ignore_result=True, shadow="s", ttl=5).id


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

    base = type("Base", (SingletonTask,), {"abstract": True, written: 5})
    with pytest.raises(ConfigurationError, match=told):
        make(Celery("other", set_as_current=False), base)


OF_OTHERS = ["unique", "one", "owner", "_lock_ttl", "rate_limit"]


@pytest.mark.parametrize("name", OF_OTHERS)
def test_attributes_of_others_are_left_alone(app: Celery, name: str) -> None:
    assert getattr(make(app, **{name: 5}), name) == 5


def test_so_are_those_of_classes_that_know_nothing_of_ours(app: Celery) -> None:
    class Upsert:
        on_conflict = "do nothing"
        block_ttl = 5

    class Base(Upsert, SingletonTask):  # type: ignore[misc]
        abstract = True

    assert make(app, Base, block_ttl=6, on_conflict="do it").block_ttl == 6
