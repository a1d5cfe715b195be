"""The shop's tests with Celery's `celery_worker`: a worker in a thread of this process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import states
from celery.exceptions import TaskRevokedError
from shop import import_catalogue, import_slowly, imports_may_end, send_newsletter, take_over, who_holds

from celery_singleton_lock import LockHeld
from celery_singleton_lock.testing import HELD_BY_TEST, SingletonLocks, disabled, expire, hold

Wait = Callable[[Callable[[], Any]], None]


@pytest.fixture(scope="session")
def celery_worker_pool() -> str:
    return os.environ.get("SHOP_POOL", "solo")


@pytest.fixture(scope="session")
def celery_worker_parameters() -> dict[str, Any]:
    return {"concurrency": 2}


def test_a_second_import_of_a_supplier_is_skipped(singleton_locks: SingletonLocks, celery_worker: Any) -> None:
    with hold(import_catalogue, 7):
        skipped, other = import_catalogue.delay(7), import_catalogue.delay(8)
        assert other.get(timeout=20) == "imported 8"
        with pytest.raises(TaskRevokedError, match=HELD_BY_TEST):
            skipped.get(timeout=20)

    (conflict,) = singleton_locks.conflicts
    assert (conflict.task_id, conflict.holder, conflict.outcome) == (skipped.id, HELD_BY_TEST, "skipped")


def test_a_newsletter_waits_for_the_one_before(
    singleton_locks: SingletonLocks, celery_worker: Any, wait_for: Wait
) -> None:
    with hold(send_newsletter):
        waiting = send_newsletter.delay()
        wait_for(lambda: singleton_locks.conflicts)
        assert waiting.state in (states.PENDING, states.RETRY)

    assert waiting.get(timeout=20) == "sent"
    assert {conflict.outcome for conflict in singleton_locks.conflicts} == {"rescheduled"}


def test_a_newsletter_gives_up_after_ten_minutes(
    singleton_locks: SingletonLocks, celery_worker: Any, wait_for: Wait
) -> None:
    with hold(send_newsletter):
        waiting = send_newsletter.delay()
        wait_for(lambda: singleton_locks.conflicts)
        singleton_locks.advance(601)
        with pytest.raises(LockHeld, match=HELD_BY_TEST):
            waiting.get(timeout=20)

    assert singleton_locks.conflicts[-1].outcome == "raised"


def test_an_import_that_loses_its_lease_stops(
    singleton_locks: SingletonLocks, celery_worker: Any, began: Path, wait_for: Wait
) -> None:
    running = import_slowly.delay(str(began))
    wait_for(began.exists)
    expire(import_slowly, str(began))

    assert running.get(timeout=20) == "lost: expired"
    assert [(lost.task_id, lost.reason) for lost in singleton_locks.lost] == [(running.id, "expired")]
    assert singleton_locks.released == []


def test_an_import_keeps_its_lease_while_time_passes(
    singleton_locks: SingletonLocks, celery_worker: Any, began: Path, wait_for: Wait
) -> None:
    running = import_slowly.delay(str(began))
    wait_for(began.exists)
    singleton_locks.advance(3600)
    imports_may_end.set()

    assert running.get(timeout=20) == "imported"
    assert singleton_locks.lost == []


def test_who_takes_over_is_told(singleton_locks: SingletonLocks, celery_worker: Any) -> None:
    with hold(take_over):
        expire(take_over)
        assert take_over.delay().get(timeout=20) is True


@pytest.fixture
def unlocked() -> Iterator[None]:
    with disabled():
        yield


def test_a_worker_locks_nothing_while_locks_are_disabled(unlocked: None, celery_worker: Any) -> None:
    assert who_holds.delay("worker").get(timeout=20) is False
