"""The shop's tests with a worker of processes: its locks are in a server, and what it does is told by results."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shop import REDIS, app, import_catalogue, import_slowly, take_over

from celery_singleton_lock import CallRevoked
from celery_singleton_lock.testing import HELD_BY_TEST, expire, hold, recorded

Wait = Callable[[Callable[[], Any]], None]


@pytest.fixture(scope="module")
def worker() -> Iterator[None]:
    app.conf.update(broker_url=REDIS, result_backend=REDIS)
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--pool", "prefork", "--concurrency", "2"]
    process = subprocess.Popen([*command, "--without-gossip", "--without-mingle"])
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)
        app.close()


def test_a_pool_process_finds_the_lock_held(worker: None) -> None:
    with recorded() as here, hold(import_catalogue, 7):
        skipped, other = import_catalogue.delay(7), import_catalogue.delay(8)
        assert other.get(timeout=30) == "imported 8"
        with pytest.raises(CallRevoked, match=HELD_BY_TEST) as caught:
            skipped.get(timeout=30)

    # The conflict is recorded in the worker. The result says the same.
    assert here.conflicts == []
    assert caught.value.reason == "skipped"
    assert import_catalogue.delay(7).get(timeout=30) == "imported 7"


def test_a_pool_process_learns_of_its_loss(worker: None, began: Path, wait_for: Wait) -> None:
    running = import_slowly.delay(str(began))
    wait_for(began.exists)
    expire(import_slowly, str(began))

    assert take_over.delay().get(timeout=30) is False
    assert running.get(timeout=30).startswith("lost: ")


def test_a_pool_process_takes_over_from_who_has_died(worker: None) -> None:
    with hold(take_over):
        expire(take_over)
        assert take_over.delay().get(timeout=30) is True
