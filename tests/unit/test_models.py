"""Tasks with `pydantic=True`: the key is made of the models that the body receives."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, uuid
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


class Part(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    model_config = pydantic.ConfigDict(frozen=True)
    size: int
    colours: frozenset[str] = frozenset()


class Tags(pydantic.RootModel[set[str]]):  # type: ignore[name-defined, misc]
    """Tags, and nothing else."""


@dataclasses.dataclass
class Place:
    shelves: set[str]


class Stock(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """Sets wherever a model can have them."""

    model_config = pydantic.ConfigDict(extra="allow")
    tags: set[str] = pydantic.Field(set())
    groups: frozenset[frozenset[str]] = frozenset()
    parts: set[Part] = pydantic.Field(set())
    rows: list[Tags] = pydantic.Field([])
    by_number: dict[int, set[str]] = pydantic.Field({})
    by_name: dict[str, Any] = pydantic.Field({})
    place: Place | None = None
    pair: tuple[int, set[str]] | None = None
    some: set[str] = pydantic.Field(set())
    renamed: set[str] = pydantic.Field(set(), serialization_alias="as")
    loud: list[str] = pydantic.Field([])

    @pydantic.field_serializer("some")
    def without_blue(self, some: set[str]) -> list[str]:
        return [colour for colour in some if colour != "blue"]

    @pydantic.field_serializer("by_name")
    def in_the_order_of_names(self, by_name: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(by_name.items()))

    @pydantic.computed_field(alias="shouted")  # type: ignore[prop-decorator, untyped-decorator]
    @property
    def shout(self) -> set[str]:
        return {word.upper() for word in self.loud}

    def model_dump(self, **options: Any) -> Any:
        return super().model_dump(**{"by_alias": True, **options})


COLOURS = ["red", "green", "blue", "black", "white", "grey"]
WITH_SETS: dict[str, Callable[[list[str]], Any]] = {
    "tags": set,
    "groups": lambda colours: frozenset(frozenset({colour, "red", "blue", "grey"}) for colour in colours),
    "parts": lambda colours: {Part(size=len(colour), colours=frozenset(colours)) for colour in colours},
    "rows": lambda colours: [set(colours), {"pink"}],
    "by_number": lambda colours: {1: set(colours), 2: set()},
    "by_name": lambda colours: {"b": set(colours), "a": 1},
    "place": lambda colours: Place(set(colours)),
    "pair": lambda colours: (1, set(colours)),
    "some": set,
    "renamed": set,
    "loud": sorted,
    "more": set,
}


def key_of_stock(field: str, colours: list[str]) -> str:
    task: Any = Celery("stock", set_as_current=False).task(base=SingletonTask, name="stock", shared=False)(load)
    return str(task.lock_key_for(Stock(**{field: WITH_SETS[field](colours)})))


def load(order: Order) -> None: ...


def load_with_more(order: Order, *rest: Any, other: Order | None = None, **more: Any) -> None: ...


def load_bound(self: Any, order: Order) -> None: ...


@pytest.fixture
def app() -> Celery:
    app = Celery("models", broker="memory://", set_as_current=False)
    # Queues in memory are those of the process.
    app.conf.update(singleton_lock_url="memory://", task_default_queue=uuid())
    return app


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


def test_a_callable_gets_the_models_as_they_were_passed(app: Celery) -> None:
    seen: list[Any] = []
    key = keys_of(app, load_with_more, lambda *args, **kwargs: seen.append((args, kwargs)))
    order = Order(supplier_id=1)

    key({"supplier_id": 1}, 5, other={"supplier_id": 1}, more=6, rest=7)
    key(order={"supplier_id": 1})

    assert seen == [((order, 5), {"other": order, "more": 6, "rest": 7}), ((), {"order": order})]


def test_models_are_validated_as_the_task_says(app: Celery) -> None:
    contexts: list[Any] = []

    class Watched(Order):
        @pydantic.field_validator("supplier_id")
        @classmethod
        def watch(cls, value: int, info: Any) -> int:
            contexts.append(info.context["currency"])
            return value

    def body(order: Any) -> None: ...

    body.__annotations__["order"] = Watched
    key = keys_of(app, body, pydantic_strict=True, pydantic_context={"currency": "EUR"})

    key({"supplier_id": 1})
    with pytest.raises(pydantic.ValidationError):
        key({"supplier_id": "1"})
    assert contexts == ["EUR"]


def test_a_field_that_the_model_does_not_dump_does_not_count(app: Celery) -> None:
    def body(order: Any) -> None: ...

    body.__annotations__["order"] = Tagged
    key = keys_of(app, body)

    assert key({"supplier_id": 1, "tag": "a"}) == key({"supplier_id": 1, "tag": "b"})


def test_what_is_no_model_is_published_for_the_worker_to_fail(app: Celery) -> None:
    task = keys_of(app, lock_mode="until_executed").__self__

    sent = [task.delay({"supplier_id": "none"}), task.delay({"supplier_id": "none"})]

    assert len({result.id for result in sent}) == 2
    with app.connection_for_read() as connection:
        queue = connection.default_channel.queue_declare(app.conf.task_default_queue, passive=True)
    assert queue.message_count == 2
    with pytest.raises(pydantic.ValidationError):
        task.apply(({"supplier_id": "none"},)).get()


def test_another_error_of_the_models_own_code_is_raised_where_the_call_is_published(app: Celery) -> None:
    class Lonely(Order):
        @pydantic.field_validator("supplier_id")
        @classmethod
        def needs_a_worker(cls, value: int) -> int:
            raise ConnectionError(value)

    def body(order: Any) -> None: ...

    body.__annotations__["order"] = Lonely
    with pytest.raises(ConnectionError):
        keys_of(app, body).__self__.delay({"supplier_id": 1})


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


def test_a_serialiser_of_the_users_that_fails_is_told_as_well(app: Celery) -> None:
    class Stubborn(Order):
        @pydantic.field_serializer("full")
        def never(self, full: bool) -> None:
            raise KeyError("never")

    def body(order: Any) -> None: ...

    body.__annotations__["order"] = Stubborn
    with pytest.raises(ConfigurationError, match=r"task models.load: lock_key: .* cannot be serialised"):
        keys_of(app, body)({"supplier_id": 1})


@pytest.fixture(scope="module")
def keys_elsewhere() -> list[dict[str, str]]:
    """The keys that processes with other seeds for their hashes make, by field."""
    program = (
        "import json\n"
        "from tests.unit.test_models import COLOURS, WITH_SETS, key_of_stock\n"
        "print(json.dumps({field: key_of_stock(field, COLOURS) for field in WITH_SETS}))"
    )
    answers = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        for seed in "123"
    ]
    return [json.loads(answer.stdout) for answer in answers]


@pytest.mark.parametrize("field", WITH_SETS)
def test_a_set_in_a_model_has_one_key_in_all_processes(field: str, keys_elsewhere: list[dict[str, str]]) -> None:
    assert {keys[field] for keys in keys_elsewhere} == {key_of_stock(field, COLOURS)}
    assert key_of_stock(field, COLOURS) != key_of_stock(field, ["red", "green"])


def test_the_order_in_which_a_set_was_filled_does_not_count(app: Celery) -> None:
    class Numbered(Order):
        numbers: set[int]

    def body(order: Any) -> None: ...

    body.__annotations__["order"] = Numbered
    key = keys_of(app, body)

    # These two are in one place of the table of a set, where the first that comes is the first.
    assert key({"supplier_id": 1, "numbers": [0, 8]}) == key({"supplier_id": 1, "numbers": [8, 0]})
    assert key({"supplier_id": 1, "numbers": [0, 8]}) != key({"supplier_id": 1, "numbers": [0, 1]})


def test_the_order_of_a_list_in_a_model_counts(app: Celery) -> None:
    class Listed(Order):
        colours: list[str]

    def body(order: Any) -> None: ...

    body.__annotations__["order"] = Listed
    key = keys_of(app, body)

    assert key({"supplier_id": 1, "colours": ["a", "b"]}) != key({"supplier_id": 1, "colours": ["b", "a"]})


def test_a_model_without_sets_has_this_very_key(app: Celery) -> None:
    key = keys_of(app)

    assert key({"supplier_id": 1}) == "singleton:v3:{models.load:6209c2be2d54c7c0793b2c9d2411dfe5}"


@pytest.mark.parametrize(("lock_key", "field"), [("{order.tags}", "{order.tags}"), ("a {order}", "{order}")])
def test_a_format_string_that_shows_a_set_of_a_model_is_refused(app: Celery, lock_key: str, field: str) -> None:
    def body(order: Any) -> None: ...

    body.__annotations__["order"] = Stock
    task = keys_of(app, body, lock_key).__self__

    with pytest.raises(ConfigurationError) as refused:
        task.delay({"tags": ["a", "b"]})

    assert str(refused.value).startswith(f"task models.load: lock_key={lock_key!r} ")
    assert f"{field} shows a set" in str(refused.value)


def test_a_format_string_may_show_a_model_without_sets_or_with_a_text_of_its_own(app: Celery) -> None:
    class Told(Stock):
        model_config = pydantic.ConfigDict(validate_default=True)
        secret: pydantic.SecretStr = pydantic.Field("none")
        url: pydantic.AnyUrl = pydantic.Field("http://shop.example")

        def __str__(self) -> str:
            return "told"

    def body(order: Any, told: Any) -> None: ...

    body.__annotations__.update(order=Order, told=Told)
    key = keys_of(app, body, "{order}/{told}/{told.secret}/{told.url}")

    assert key({"supplier_id": 1}, {"tags": ["a"]}) == key({"supplier_id": "1"}, {}) != key({"supplier_id": 2}, {})
