"""Tasks with `pydantic=True`: the key is made of the models that the body receives."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.app import base

from celery_singleton_lock import ConfigurationError, SingletonTask

if not hasattr(base, "pydantic_wrapper"):
    pytest.skip("this Celery knows no models", allow_module_level=True)
pydantic = importlib.import_module("pydantic")


class Order(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    supplier_id: int
    full: bool = False


class Tagged(Order):
    tag: str = pydantic.Field("", exclude=True)


class Tags(pydantic.RootModel[set[str]]):  # type: ignore[name-defined, misc]
    """Tags, and nothing else."""


@dataclasses.dataclass
class Place:
    shelves: set[str]


class Stock(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Sets wherever a model can have them."""

    model_config = pydantic.ConfigDict(extra="allow")
    supplier_id: int = 1
    tags: set[str] | None = None
    groups: frozenset[frozenset[str]] | None = None
    stocks: list["Stock"] = pydantic.Field([])
    rows: list[Tags] = pydantic.Field([])
    by_name: dict[str, Any] = pydantic.Field({})
    place: Place | None = None
    pair: tuple[int, set[str]] | None = None
    renamed: set[str] | None = pydantic.Field(None, serialization_alias="as")


WITH_SETS: list[dict[str, Any]] = [
    {"tags": ["a"]},
    {"groups": [["a"]]},
    {"stocks": [{"tags": ["a"]}]},
    {"rows": [["a"]]},
    {"by_name": {"b": {"a"}}},
    {"place": Place({"a"})},
    {"pair": (1, ["a"])},
    {"renamed": ["a"]},
    {"more": {"a"}},
]


def load(order: Order) -> None: ...


def load_bound(self: Any, order: Order) -> None: ...


def keys_of(app: Celery, body: Callable[..., None] = load, lock_key: Any = None, **options: Any) -> Any:
    task = app.task(base=SingletonTask, name="models.load", pydantic=True, lock_key=lock_key, **options)(body)
    return task.lock_key_for


ONE_CALL: list[Any] = [
    {"supplier_id": 1},
    {"full": False, "supplier_id": 1},
    {"supplier_id": "1"},
    Order(supplier_id=1),
]


@pytest.mark.parametrize("lock_key", [None, ["order"], lambda order: order], ids=["all", "names", "callable"])
def test_what_the_body_receives_as_one_model_is_one_call(app: Celery, lock_key: Any) -> None:
    key = keys_of(app, lock_key=lock_key)

    assert len({key(order) for order in ONE_CALL} | {key(order=order) for order in ONE_CALL}) == 1
    assert len({key({"supplier_id": 1}), key({"supplier_id": 2}), key({"supplier_id": 1, "full": True})}) == 3


@pytest.mark.parametrize(
    "lock_key", ["{order.supplier_id}", lambda order: order.supplier_id], ids=["format", "callable"]
)
@pytest.mark.parametrize("bind", [False, True])
def test_a_format_and_a_callable_see_the_model(app: Celery, lock_key: Any, bind: bool) -> None:
    key = keys_of(app, load_bound if bind else load, lock_key, bind=bind)

    assert key({"supplier_id": 1}) == key(order={"supplier_id": 1, "full": True}) != key({"supplier_id": 2})


@pytest.mark.parametrize(
    ("hint", "makes"), [(Order, True), (Order | None, True), (list[Order], False), (Order | Tagged, False)], ids=str
)
def test_models_are_made_for_the_hints_for_which_celery_makes_them(app: Celery, hint: Any, makes: bool) -> None:
    def body(order: Any) -> None: ...

    body.__annotations__["order"] = hint
    seen: list[Any] = []
    keys_of(app, body, lambda order: seen.append(order) or "a key")({"supplier_id": 1})

    assert (type(seen[0]) is Order) is makes


@pytest.mark.parametrize("fields", WITH_SETS, ids=lambda fields: next(iter(fields)))
def test_a_model_with_a_set_makes_no_key_unless_a_callable_makes_it(app: Celery, fields: dict[str, Any]) -> None:
    def body(order: Any) -> None: ...

    body.__annotations__["order"] = Stock
    stock = Stock(**fields)
    with pytest.raises(
        ConfigurationError, match=r"^task models.load: lock_key: .* has a set.*; name .* or give a call"
    ):
        keys_of(app, body)(stock)

    other = Celery("other", set_as_current=False)
    assert keys_of(other, body, lambda order: order.supplier_id)(stock)
    assert keys_of(Celery("third", set_as_current=False), body, "{order.supplier_id}")(stock)


def test_a_model_that_cannot_be_written_makes_no_key_and_is_told_whatever_it_raises(app: Celery) -> None:
    class Priced(Order):
        @pydantic.computed_field
        def price(self) -> int:
            raise KeyError(self.supplier_id)

    def body(order: Priced) -> None: ...

    body.__annotations__["order"] = Priced
    with pytest.raises(ConfigurationError, match=r"^task models.load: lock_key: 'order', .* \(KeyError: 1\); name .*"):
        keys_of(app, body)({"supplier_id": 1})


def test_a_model_without_sets_has_this_very_key(app: Celery) -> None:
    key = keys_of(app)

    assert key({"supplier_id": 1}) == "singleton:v3:{models.load:6209c2be2d54c7c0793b2c9d2411dfe5}"


def test_what_is_no_model_is_published_for_the_worker_to_fail(app: Celery) -> None:
    task = keys_of(app, lock_mode="until_executed").__self__

    sent = [task.delay({"supplier_id": "none"}), task.delay({"supplier_id": "none"})]

    assert len({result.id for result in sent}) == 2
    with app.connection_for_read() as connection:
        queue = connection.default_channel.queue_declare(app.conf.task_default_queue, passive=True)
    assert queue.message_count == 2
    with pytest.raises(pydantic.ValidationError):
        task.apply(({"supplier_id": "none"},)).get()


@pytest.mark.parametrize(
    ("lock_key", "named"),
    [
        ("{order.nothing}", "lock_key='{order.nothing}'"),
        (lambda order: order.nothing, "lock_key=<function"),
        (lambda order: object(), "lock_key: "),
    ],
    ids=["format", "callable", "serialiser"],
)
def test_a_failure_names_the_task_and_the_option(app: Celery, lock_key: Any, named: str) -> None:
    task = keys_of(app, lock_key=lock_key).__self__

    with pytest.raises(ConfigurationError) as refused:
        task.delay({"supplier_id": 1})

    assert str(refused.value).startswith(f"task models.load: {named}")
