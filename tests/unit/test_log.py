"""The fields of a line of the log, as columns of a log in JSON."""

import json
import logging
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
import structlog
from celery import Celery
from pythonjsonlogger.json import JsonFormatter

from celery_singleton_lock import LockHeld
from celery_singleton_lock.definition.settings import store_of
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.records import Claim
from tests.unit.conftest import make

FORMATTERS = {
    "python-json-logger": JsonFormatter(),
    "structlog": structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(sort_keys=True),
        ],
        foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
    ),
}
MESSAGE = {"python-json-logger": "message", "structlog": "event"}


@pytest.fixture(params=FORMATTERS)
def formatter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def written(formatter: str) -> Iterator[StringIO]:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMATTERS[formatter])
    logger = logging.getLogger("celery_singleton_lock")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def lines(written: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_each_field_is_a_column_and_the_message_is_as_before(app: Celery, formatter: str, written: StringIO) -> None:
    task = make(app, lock_mode="until_executed", lock_on_conflict="raise")
    key = task.lock_key_for(1)
    store_of(app).acquire(Claim(key, "token", 30, task_id="a"))

    with pytest.raises(LockHeld):
        task.delay(1)

    (line,) = lines(written)
    assert line["lock_event"] == "lock.conflict"
    assert line["lock_key"] == key
    assert (line["task_id"], line["holder"], line["state"], line["outcome"]) == (None, "a", "held", "unpublished")
    assert 0 < line["remaining"] <= 30
    assert line[MESSAGE[formatter]].startswith(f"lock.conflict key={key} task_id=None holder=a state=held age=0.")


def test_values_are_whole_and_the_line_is_one(
    formatter: str, written: StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "shows_labels", True)
    log.remember_label("a\n1", "supplier\n\x1b7")

    error = OSError("no\nanswer\x1b")
    log.write(logging.WARNING, "lock.late", "%s", error, key="k", task_id="a\n1", late=1.2345, leases=2)

    (line,) = lines(written)
    assert line[MESSAGE[formatter]] == (
        r"lock.late key=k task_id=a\n1 label='supplier\\n\\x1b7' late=1.2 leases=2: no\nanswer\x1b"
    )
    assert (line["task_id"], line["lock_label"], line["late"], line["leases"]) == ("a\n1", "supplier\n\x1b7", 1.2345, 2)


def test_a_line_that_is_not_written_makes_no_record(written: StringIO) -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("nobody reads it")

    log.write(logging.DEBUG, "lock.released", "%s", Costly(), key=Costly())

    assert lines(written) == []
