"""Lock keys: what makes two calls the same, and the exact text of a key."""

import re
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, IntFlag, StrEnum
from string import Formatter
from typing import Any

import kombu.serialization
import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_singleton_lock import ConfigurationError, Lock, LockLost, SingletonTask
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.records import Claim
from tests.unit.conftest import refused

LONGEST_NAME = 200

however_slowly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How busy a machine is says nothing about keys."""


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Mood(StrEnum):
    CALM = "calm"


class Right(IntFlag):
    READ = 1
    WRITE = 2


class Price(int):
    def __repr__(self) -> str:
        return "a price"


class Name(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "a name"


class Share(float):
    def __repr__(self) -> str:
        return "a share"


class Names(list[Any]):
    pass


class Unserialisable:
    pass


def sync(x: Any, y: Any = 5) -> None:
    """A body for keys to be made of."""


def maker(function: Any = sync, choice: Any = None, name: Any = "shop.tasks.sync") -> Any:
    app = Celery("shop", set_as_current=False)
    task = app.task(base=SingletonTask, name="shop.tasks.sync", shared=False, lock_key=choice, lock_name=name)(function)
    app.finalize()
    return task.lock_key_for


key = maker()

# A change in this table means that workers of two releases lock past each other:
# it needs a new version in the key, not new digits here.
GOLDEN = {
    "an int": (1, "9f62a583b84f8227e6432bfe2c555eb2"),
    "a negative int": (-7, "134e0dfa335f7d5b43222fab54850382"),
    "a great int": (2**80, "993433043d2f90ada5ddf9ef2747378e"),
    "a text": ("1", "1ac590d7ff71ed1da842b7323fb10a36"),
    "an empty text": ("", "a8bf1be56acb7dd9b01148b335c4c19d"),
    "unicode": ("Grüße, 世界 🌍", "e3de46442e8e2287f10070f125055022"),
    "None": (None, "c48b8b1b1dd29ad063690aa3e8a1e503"),
    "True": (True, "e880f83c656d7772ff7a57654b7115ee"),
    "False": (False, "df58f8879ab320572a276e41122371f2"),
    "a float": (1.0, "bbd6a2163ef244953ca52b9bf606f858"),
    "a small float": (1e-9, "7a82ce770cb48b8e769bb70b11be8de3"),
    "a list": ([1, [2, "3"]], "20140ac6c2a3ea518e719f32f4f37dd1"),
    "a tuple": ((1, (2, "3")), "20140ac6c2a3ea518e719f32f4f37dd1"),
    "a dict": ({"b": {"c": [None]}, "a": 1}, "24283bdd27b73e9e80eff366220b3b36"),
    "a dict with int keys": ({1: "a", 10: "b", 9: "c"}, "60e204df57f25d40cd0704e051981a65"),
    "a naive datetime": (datetime(2026, 1, 2, 3, 4, 5, 600000), "7e9e763ea5eb9e7ca45c71397d77ab8b"),  # noqa: DTZ001
    "a datetime in UTC": (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "6345fbfa996641693d873f27be71262c"),
    "a datetime elsewhere": (
        datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))),
        "a8a06ac9bd28319d01d2db99be9e8e6b",
    ),
    "a date": (date(2026, 1, 2), "cbb3afbb230c87dba9ad7ab317580f94"),
    "a time": (time(3, 4, 5), "916fefa66741e28ab1e71c8d72fc9916"),
    "a UUID": (uuid.UUID("12345678-1234-4234-8234-123456789abc"), "2e699f1997c80cedc2e914d4bbaa8a69"),
    "a Decimal": (Decimal("1.50"), "a5f89d09468d141119a084a649d2609f"),
    "bytes of text": (b"abc", "d437ad6886916766c7659140ea547995"),
    "other bytes": (b"\xff\x00", "49355ecc81ad8c96559b7b267fd22ddb"),
    "an Enum": (Colour.RED, "8cc7792376dafd2ced72282f0ae5d1c9"),
    "an IntEnum": (Level.HIGH, "5bf4d400a61ada44922ec4bb4d59a45f"),
    "a StrEnum": (Mood.CALM, "79ce3ddecc08fa0845fcdf60014d0944"),
    "an Enum as a dict key": ({Level.HIGH: 1, Mood.CALM: 2}, "9e2d241f33e361e891c33440ce7fa0ba"),
    "two flags": (Right.READ | Right.WRITE, "5bf4d400a61ada44922ec4bb4d59a45f"),
    "the longest int": (10**4299, "2ee093a01c61d2c7e37e2945abad85e9"),
    "an int of a class of its own": (Price(7), "932f9f59c6d27f23fe47f2e0bc467b88"),
    "a text of a class of its own": (Name("7"), "e3cc817cb895b1ad4558b121f76d3084"),
    "a float of a class of its own": (Share(1.5), "cf398e61dd2cacabf4fc3223db094b23"),
    "a list of a class of its own": (Names([1]), "f82c114a1ef3c4b543990375acae8bee"),
    "no number": (float("nan"), "da252fb00ad7a60525c04f7d876fa910"),
    "infinity": (float("inf"), "bffa6b3d7975ad8e6472faf59cbec63c"),
    "less than nothing": (-0.0, "79782da3f883a8be867445a45b4c51cf"),
    "half a character": ("\ud800", "a85d1edb48347c07adfd23f57a5713c1"),
    "what formats and JSON escape": ('\x00\x1f\x7f"\\/%s{}', "996d448c180cee707fe3ac103a1581ac"),
    "a dict with bool keys": ({True: 1, False: 2}, "60ab9d8c12caebc4f382d45c0f8ee8d6"),
    "lists ten deep": ([[[[[[[[[[]]]]]]]]]], "663fc98de1e9c6f0718667a1120901fb"),
}


@pytest.mark.parametrize(("value", "digest"), GOLDEN.values(), ids=GOLDEN)
def test_the_key_of_a_call_is_this_very_text(value: Any, digest: str) -> None:
    assert key(value) == f"singleton:v3:{{shop.tasks.sync:{digest}}}"


@pytest.mark.parametrize(
    ("choice", "one", "same", "another"),
    [
        (["x"], (1, 2), (1, 3), (2, 2)),
        ((), (1, 2), (3, 4), None),
        ("{x[id]}-{y}", ({"id": 7, "name": "a"},), ({"id": 7, "name": "b"}, 5), ({"id": 8},)),
        (None, (Colour.RED, Level.HIGH), ("red", 3), ("red", "3")),
    ],
)
def test_what_counts_makes_the_key_and_nothing_else(choice: Any, one: Any, same: Any, another: Any) -> None:
    keys = maker(choice=choice)

    assert keys(*one) == keys(*same)
    assert another is None or keys(*one) != keys(*another)


def test_a_callable_gets_the_arguments_as_they_were_passed() -> None:
    seen: list[Any] = []

    def choose(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return {"tenant": kwargs["y"]["tenant"]}

    keys = maker(choice=choose)
    one = keys(1, y={"tenant": "a", "job": 1})
    other = keys(2, y={"tenant": "a", "job": 2})

    assert seen == [((1,), {"y": {"tenant": "a", "job": 1}}), ((2,), {"y": {"tenant": "a", "job": 2}})]
    assert one == other
    assert one != keys(1, y={"tenant": "b"})


def test_a_format_string_names_what_a_function_takes_besides() -> None:
    def of_any(*args: Any, **kwargs: Any) -> None: ...

    keys = maker(of_any, "{kwargs[repository]}/{args[0]}")

    assert keys("a", repository=1, pull=1) == keys("a", repository=1, pull=2) != keys("b", repository=1, pull=1)


@pytest.mark.parametrize("choice", [("supplier", "page"), "{supplier}-{page}"])
def test_the_arguments_that_do_not_count_may_be_missing(choice: Any) -> None:
    def of_three(supplier: int, full: bool, *rest: int, page: int = 1, **others: int) -> None: ...

    key, key_of_some = maker(of_three, choice), maker(of_three, choice).__self__.lock_key_of_some

    assert key_of_some(7) == key_of_some(supplier=7) == key(7, True, 1, other=2)
    with pytest.raises(TypeError, match="missing a required argument: 'supplier'"):
        key_of_some(full=True)


UNKNOWN = ("unknown parameter 'z'", "x, y")
KINDS = ("None", "parameter names", "format string", "callable")
NO_KEYS: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "an unknown parameter": ((["z"], ("x", "z"), "{z}", "{x}-{z.name}", "{z[0]}", "{x:{z}}"), UNKNOWN),
    "a number": (("{}", "{0}"), ("unknown parameter",)),
    "no field": (("", "all", "100 %", "{{x}}"), ("lock_key=()",)),
    "a broken format": (("{x", "x}", "{x!}", "{x!z}", "{x!R:>5}", "{x:{x!z}}"), ("is not a format string",)),
    "a missing comma": (("x",), ('("x",)', '"{x}"')),
    "another type": ((1, True, 1.5, {"x"}, {"x": 1}, ["x", 1], [None], b"x"), KINDS),
}


@pytest.mark.parametrize("what", NO_KEYS)
def test_what_can_never_make_a_key_is_refused_and_told_what_can(what: str) -> None:
    choices, told = NO_KEYS[what]
    for choice in choices:
        with refused(f"lock_key={choice!r}", *told):
            maker(choice=choice)


@pytest.mark.parametrize("name", ["", "n" * (LONGEST_NAME + 1), 7, b"name"])
def test_a_bad_name_is_refused_and_told_what_is_allowed(name: Any) -> None:
    with refused(f"lock_name={name!r:.40}"[:40], f"1 to {LONGEST_NAME} characters"):
        maker(name=name)


@pytest.mark.parametrize("value", [Unserialisable(), {1, 2}, 1j, [Unserialisable()], {"a": Unserialisable()}])
def test_an_argument_that_cannot_be_serialised_is_refused_and_told_the_alternatives(value: Any) -> None:
    what = f"lock_key: 'x', a value of type {type(value).__name__}, cannot be serialised ("
    with refused(what, "name the parameters that count", "callable"):
        key(value)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class Unspeakable(Unserialisable):
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(nested(100_000), "list"), (10**5000, "int"), (Unspeakable(), "Unspeakable")],
    ids=["too deep", "too long a number", "no text of its own"],
)
def test_what_cannot_even_be_shown_is_refused_by_its_type(value: Any, kind: str) -> None:
    app = Celery("shop", set_as_current=False)
    task = app.task(base=SingletonTask, name="shop.sync", shared=False, lock_key=lambda x, y=5: value)(sync)

    with pytest.raises(ConfigurationError, match=f"task shop.sync: lock_key: a value of type {kind} cannot be serial"):
        task.lock_key_for(1)


@pytest.mark.parametrize(
    ("template", "value", "field"),
    [
        ("{x}", {"a", "b"}, "{x}"),
        ("{x}", frozenset("ab"), "{x}"),
        ("{y}/{x!r:>40}", {"a", "b"}, "{x}"),
        ("{x[tags]}", {"tags": {"a", "b"}}, "{x[tags]}"),
        ("{x}", {"tags": [("a", {"b"})]}, "{x}"),
        ("{x}", {1: frozenset()}, "{x}"),
    ],
)
def test_a_format_string_that_shows_a_set_is_refused_and_told_the_alternatives(
    template: str, value: Any, field: str
) -> None:
    with refused(f"lock_key={template!r}", f"{field} shows a set", "returns sorted(...)"):
        maker(choice=template)(value, "")


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (lambda *_: None, r"returned None .*\(\), .*lock_key=None on the task"),
        (lambda x: x["missing"], "fails for this call .*TypeError"),
    ],
    ids=["None", "an error"],
)
def test_a_callable_that_makes_no_key_is_refused_for_this_call(choice: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"task shop.tasks.sync: lock_key=.*{says}"):
        maker(choice=choice)(1)


@pytest.mark.parametrize(
    "error", [SoftTimeLimitExceeded(), LockLost("key", "expired")], ids=lambda error: type(error).__name__
)
def test_an_error_that_ends_the_body_which_publishes_is_no_error_of_the_key(error: Exception) -> None:
    def interrupted(*_: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        maker(choice=interrupted)(1)


@pytest.mark.parametrize("name", ["{", "}", "a{b}c", "%", "%7B", "100%", "a:b", "müde"])
def test_a_name_can_be_read_back_from_its_keys(name: str) -> None:
    made = maker(name=name)(1)
    store = MemoryStore()
    store.acquire(Claim(made, "token", 30.0, task_id="id"))

    (holder,) = store.holders(made)

    assert holder.task_name == name


@pytest.mark.parametrize("choice", [None, ["x"], "{x}", lambda x, y=5: x], ids=["all", "names", "format", "callable"])
def test_no_argument_can_be_read_in_a_key(choice: Any) -> None:
    made = maker(choice=choice)("alice@example.org")

    assert "alice" not in made
    assert "example" not in made


def unfolded(moment: Any) -> Any:
    """*moment* without the mark of a repeated hour, which no ISO text has."""
    return moment.replace(fold=0)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.dates()
    | st.times().map(unfolded)
    | st.datetimes().map(unfolded)
    | st.datetimes(timezones=st.just(UTC)).map(unfolded),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False), inner)
    ),
    max_leaves=10,
)


def delivered(value: Any) -> Any:
    """*value* as a worker gets it out of a message."""
    content_type, encoding, payload = kombu.serialization.dumps(value, serializer="json")
    return kombu.serialization.loads(payload, content_type, encoding)


def normal(value: Any) -> Any:
    """A value equal to that of another value only if the two are the same on the wire."""
    if isinstance(value, dict):
        return ("dict", frozenset((name, normal(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(map(normal, value)))
    return (type(value), repr(value))


@however_slowly
@given(plain_values)
def test_publisher_and_worker_agree_on_the_key(value: Any) -> None:
    assert key(value) == key(delivered(value))


# The usual arguments are written in a way of their own; what a callable returns never is.
usual_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
strange_values = st.sampled_from([value for value, _ in GOLDEN.values()])
of_all = key, maker(choice=lambda x, y=5: {"x": x, "y": y})
of_one = maker(choice=("y",)), maker(choice=lambda _, y=5: {"y": y})
TEMPLATE = "{x!r:>12}/{y}{{%s}}"
of_text = maker(choice=TEMPLATE), maker(choice=lambda x, y=5: Formatter().format(TEMPLATE, x=x, y=y))


@however_slowly
@given(usual_values | plain_values | strange_values, usual_values | strange_values)
def test_each_argument_is_written_as_any_value_is(x: Any, y: Any) -> None:
    for keys, same_keys in (of_all, of_one):
        assert keys(x) == same_keys(x)
        assert keys(x, y) == keys(y=y, x=x) == same_keys(x, y)


@however_slowly
@given(usual_values, usual_values)
def test_a_format_string_is_filled_in_as_python_does(x: Any, y: Any) -> None:
    keys, same_keys = of_text

    assert keys(x) == same_keys(x)
    assert keys(x, y) == same_keys(x, y)


@however_slowly
@given(plain_values, plain_values)
def test_different_arguments_have_different_keys(one: Any, other: Any) -> None:
    same = normal(delivered(one)) == normal(delivered(other))

    assert (key(one) == key(other)) is same


@however_slowly
@given(st.text(min_size=1, max_size=LONGEST_NAME), st.text(min_size=1, max_size=LONGEST_NAME))
def test_different_names_have_different_keys(one: str, other: str) -> None:
    # A task takes its name in the same way, and costs an app.
    keys = {Lock(name, url="memory://").key for name in (one, other)}

    assert len(keys) == len({one, other})
    assert all(made.count("{") == made.count("}") == 1 and made.endswith("}") for made in keys)


def label(template: Any, *args: Any, **kwargs: Any) -> str:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(singleton_lock_url=f"memory://{uuid.uuid4()}", task_always_eager=True)

    @app.task(base=SingletonTask, name="shop.tasks.labelled", bind=True, shared=False, lock_label=template)
    def labelled(self: Any, x: Any, y: Any = 5) -> str:
        (holder,) = self.lock_holders(x, y)
        return holder.label or ""

    app.finalize()
    return str(app.tasks["shop.tasks.labelled"].apply(args, kwargs, throw=True).get())


def test_a_label_is_filled_in_with_the_arguments_and_their_defaults() -> None:
    assert label("{x} of {y}", 7) == "7 of 5"
    assert label("{x} of {y}", y="all", x=Colour.RED) == "red of all"
    assert label("{x[0]}", [1, 2]) == "1"


@pytest.mark.parametrize("text", ["a\nb", "a\x1fb", "a\x1b[31mb", "a\ud800b", "a\u202eb", "\t"])
def test_a_label_is_one_line_of_what_can_be_sent_and_printed(text: str) -> None:
    made = label("{x}", text)

    assert made.isprintable()
    made.encode()


@pytest.mark.parametrize(
    ("template", "says"),
    [("{z}", "unknown parameter 'z'"), ("nightly", "names no {parameter}"), (7, "a format string")],
)
def test_a_label_that_can_never_be_filled_in_is_refused(template: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)) as refused:
        label(template, 1)

    assert f"lock_label={template!r}" in str(refused.value)
    assert "lock_key" not in str(refused.value)
