"""The shop's tests in eager mode: no worker, no broker, no Redis."""

import pytest
from celery.exceptions import TaskRevokedError
from shop import (
    app,
    import_catalogue,
    import_slowly,
    number_an_order,
    rebuild_index,
    refresh_prices,
    sell,
    send_report,
    stock_lock,
    take_over,
    warm_cache,
    who_holds,
)

from celery_singleton_lock import LockHeld, SingletonLockError
from celery_singleton_lock.testing import (
    HELD_BY_TEST,
    Conflicted,
    Lost,
    SingletonLocks,
    disabled,
    expire,
    hold,
    memory_store,
    recorded,
)

pytestmark = pytest.mark.usefixtures("eager")


def test_a_second_import_of_a_supplier_is_skipped(singleton_locks: SingletonLocks) -> None:
    with hold(import_catalogue, 7):
        skipped = import_catalogue.delay(7, full=True)
        other = import_catalogue.delay(8)

    with pytest.raises(TaskRevokedError):
        skipped.get()
    assert other.get() == "imported 8"
    assert [conflict.outcome for conflict in singleton_locks.conflicts] == ["skipped"]


def test_a_refresh_fails_while_another_goes_on(singleton_locks: SingletonLocks) -> None:
    with hold(refresh_prices, supplier_id=7) as holder, pytest.raises(LockHeld, match=HELD_BY_TEST):
        refresh_prices.delay(7).get()

    assert holder.task_id == HELD_BY_TEST
    assert refresh_prices.delay(7).get() == "refreshed 7"
    assert singleton_locks.conflicts == [
        Conflicted(
            task="shop.refresh_prices",
            task_id=singleton_locks.conflicts[0].task_id,
            key=refresh_prices.lock_key_for(7),
            holder=HELD_BY_TEST,
            outcome="raised",
        )
    ]


def test_a_call_that_would_wait_for_its_own_test_fails_at_once(singleton_locks: SingletonLocks) -> None:
    with hold(number_an_order, 3), pytest.raises(LockHeld, match=HELD_BY_TEST):
        number_an_order.delay(3).get()

    assert number_an_order.delay(3).get() == "numbered 3"


def test_what_happened_is_plain_data(singleton_locks: SingletonLocks) -> None:
    result = import_catalogue.delay(7)

    (acquired,), (released,) = singleton_locks.acquired, singleton_locks.released
    assert acquired.task == released.task == "shop.import_catalogue"
    assert acquired.task_id == released.task_id == result.id
    assert acquired.key == released.key == import_catalogue.lock_key_for(7)
    assert acquired.fence > 0
    assert not acquired.took_over
    assert [*singleton_locks.lost, *singleton_locks.conflicts, *singleton_locks.unanswered] == []


def test_the_report_is_sent_once_an_hour(singleton_locks: SingletonLocks) -> None:
    assert send_report.delay().get() == "sent"
    singleton_locks.advance(3599)
    with pytest.raises(TaskRevokedError):
        send_report.delay().get()
    singleton_locks.advance(2)
    assert send_report.delay().get() == "sent"


def test_who_holds_a_lock_goes_on_holding_it_while_time_passes() -> None:
    with memory_store(app) as store, hold(import_catalogue, 7), hold(stock_lock.key, app=app):
        store.advance(24 * 3600)

        assert import_catalogue.lock_holders(7)[0].task_id == HELD_BY_TEST
        assert stock_lock.acquire(blocking=False) is None


def test_an_import_that_dies_is_taken_over(singleton_locks: SingletonLocks) -> None:
    with hold(import_slowly, began="/nowhere"):
        expire(import_slowly, began="/nowhere")

        assert take_over.delay().get() is True
    assert take_over.delay().get() is False
    assert singleton_locks.lost == []


def test_a_lock_outside_tasks_can_be_lost(singleton_locks: SingletonLocks) -> None:
    with stock_lock as lease:
        expire(stock_lock.key, app=app)

        assert lease.lost
        assert singleton_locks.lost == [Lost(task=None, task_id=None, key=stock_lock.key, reason="expired")]
    assert singleton_locks.released == []


def test_bodies_run_although_there_is_no_store() -> None:
    with disabled():
        assert who_holds.delay("any").get() is False
        assert import_catalogue.delay(7).get() == "imported 7"
        assert sell() == "sold"


def test_calls_that_are_queued_or_run_are_not_published_again(singleton_locks: SingletonLocks) -> None:
    app.conf.task_always_eager = False
    with hold(rebuild_index), hold(warm_cache):
        assert rebuild_index.delay().id == HELD_BY_TEST
        assert warm_cache.delay().id == HELD_BY_TEST
    assert [conflict.outcome for conflict in singleton_locks.conflicts] == ["unpublished"] * 2
    with hold(warm_cache):
        expire(warm_cache)
        assert warm_cache.delay().id != HELD_BY_TEST


def test_a_lock_outside_tasks_is_in_memory_as_well(singleton_locks: SingletonLocks) -> None:
    with hold(stock_lock.key, app=app):
        assert stock_lock.acquire(timeout=0.01) is None
    assert sell() == "sold"
    assert [acquired.key for acquired in singleton_locks.acquired] == [stock_lock.key]


def test_a_lock_is_free_again_whatever_happens(singleton_locks: SingletonLocks) -> None:
    with pytest.raises(ZeroDivisionError), hold(import_catalogue, 7):
        _ = 1 / 0
    with pytest.raises(SingletonLockError, match=HELD_BY_TEST), hold(import_catalogue, 7), hold(import_catalogue, 7):
        pass

    assert singleton_locks.store.held() == []
    assert import_catalogue.delay(7).get() == "imported 7"


def test_one_record_knows_nothing_of_another(singleton_locks: SingletonLocks) -> None:
    with recorded() as before:
        import_catalogue.delay(7)
    with recorded() as after:
        pass

    assert [each.task for each in before.acquired] == ["shop.import_catalogue"]
    assert after.acquired == []
