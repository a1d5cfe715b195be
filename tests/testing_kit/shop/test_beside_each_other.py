"""The shop's tests by pytest-xdist on one server: each process of it has a prefix of its own."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from shop import REDIS, import_catalogue

from celery_singleton_lock import SingletonLockError
from celery_singleton_lock.testing import hold

pytestmark = pytest.mark.usefixtures("eager")


@pytest.mark.parametrize("number", [1, 2])
def test_two_hold_the_lock_of_one_call(
    number: int, worker_id: str, wait_for: Callable[[Callable[[], object]], None]
) -> None:
    desk = Path(os.environ["SHOP_DESK"])
    import_catalogue.app.conf.singleton_lock_url = REDIS
    with hold(import_catalogue, 7) as holder:
        assert worker_id in holder.key
        (desk / worker_id).touch()
        # Both at the same time.
        wait_for(lambda: len(list(desk.iterdir())) == 2)
        with pytest.raises(SingletonLockError, match=holder.key), hold(import_catalogue, 7):
            pass
    assert import_catalogue.delay(7).get() == "imported 7"
