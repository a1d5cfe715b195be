"""The README's example, on a worker."""

import pytest

from celery_singleton_lock import CallRevoked
from celery_singleton_lock.testing import HELD_BY_TEST, hold
from tests.pages.conftest import Program, StartWorker


def test_the_example_does_what_the_text_says(shop: Program, worker: StartWorker) -> None:
    module = shop("README.md")
    worker()

    with hold(module.import_catalogue, 7):
        other = module.import_catalogue.delay(8)
        skipped = module.import_catalogue.delay(7, full=True)
        assert other.get(timeout=30) is None
        with pytest.raises(CallRevoked, match=HELD_BY_TEST):
            skipped.get(timeout=30)

    assert skipped.state == "REVOKED"
    assert module.import_catalogue.delay(7).get(timeout=30) is None
