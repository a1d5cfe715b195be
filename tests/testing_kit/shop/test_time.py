"""The shop's tests with the clock in the hands of time-machine and freezegun."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta

import freezegun
import pytest
import time_machine
from celery.exceptions import TaskRevokedError
from shop import import_catalogue, import_slowly, send_report

from celery_singleton_lock.testing import SingletonLocks, hold

pytestmark = pytest.mark.usefixtures("eager")
NEW_YEAR = datetime(2030, 1, 1, tzinfo=UTC)

Moved = Callable[[timedelta], AbstractContextManager[object]]


@contextmanager
def by_time_machine(ahead: timedelta) -> Iterator[None]:
    with time_machine.travel(NEW_YEAR + ahead, tick=False):
        yield


@contextmanager
def by_freezegun(ahead: timedelta) -> Iterator[None]:
    with freezegun.freeze_time(NEW_YEAR + ahead):
        yield


@pytest.fixture(params=[by_time_machine, by_freezegun])
def at(request: pytest.FixtureRequest) -> Moved:
    moved: Moved = request.param
    return moved


def test_a_lock_does_not_end_because_the_clock_is_moved(at: Moved, singleton_locks: SingletonLocks) -> None:
    with at(timedelta()), hold(import_catalogue, 7):
        with at(timedelta(days=1)):
            assert datetime.now(UTC) == NEW_YEAR + timedelta(days=1)
            with pytest.raises(TaskRevokedError):
                import_catalogue.delay(7).get()
        with at(timedelta(days=-1)), pytest.raises(TaskRevokedError):
            import_catalogue.delay(7).get()


def test_a_cool_down_ends_by_the_clock_of_the_locks_alone(at: Moved, singleton_locks: SingletonLocks) -> None:
    with at(timedelta()):
        assert send_report.delay().get() == "sent"
    with at(timedelta(hours=2)):
        with pytest.raises(TaskRevokedError):
            send_report.delay().get()
        singleton_locks.advance(2 * 3600)
        assert send_report.delay().get() == "sent"


def test_a_lease_is_renewed_while_the_clock_stands_still(at: Moved, singleton_locks: SingletonLocks) -> None:
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    with at(timedelta()), hold(import_slowly, "anywhere"):
        # Its ttl is 3 s.
        while time.clock_gettime(time.CLOCK_MONOTONIC) < began + 3.5:
            assert import_slowly.lock_holders("anywhere")
