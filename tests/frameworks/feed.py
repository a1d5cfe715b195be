"""The outside world of the shops: a supplier's catalogue, whose last page comes when the test says so."""

import os
from collections.abc import Iterator

from celery import current_task

from tests.recorder import Recorder

recorder = Recorder(os.environ.get("TEST_STORE", "redis://127.0.0.1:6379/0").removesuffix("/0") + "/3")


def pages(supplier_id: int) -> Iterator[int]:
    """The pages of the catalogue, on the record."""
    with recorder.body(supplier_id, current_task.request.id):
        yield 1
        recorder.wait_at("the last page")
        yield 2
