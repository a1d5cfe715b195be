"""Lock keys: what makes two calls the same, and the exact text of a key."""

import inspect
import json
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any

import kombu.serialization
import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock import ConfigurationError, SingletonTask
from celery_singleton_lock.backends.base import lock_name_of
from celery_singleton_lock.core.key import MAX_NAME, KeyChoice, KeyMaker


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Mood(StrEnum):
    CALM = "calm"


class Unserialisable:
    pass


def sync(x: Any, y: Any = 5) -> None:
    """A body for keys to be made of."""


def maker(function: Any = sync, choice: KeyChoice = None, name: str = "shop.tasks.sync") -> KeyMaker:
    return KeyMaker(name, inspect.signature(function), choice)


def key(*args: Any, **kwargs: Any) -> str:
    """The key of `sync(*args, **kwargs)` when all arguments count."""
    return maker().key("singleton", args, kwargs)


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
}


@pytest.mark.parametrize(("value", "digest"), GOLDEN.values(), ids=GOLDEN)
def test_the_key_of_a_call_is_this_very_text(value: Any, digest: str) -> None:
    assert key(value) == f"singleton:v1:{{shop.tasks.sync:{digest}}}"
