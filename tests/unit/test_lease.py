"""A lease by itself: how it waits for its turn, who looks after it, and when there is nothing left to release."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_singleton_lock import Lease, LockLost, SingletonLockError, StoreError, current_lease
from celery_singleton_lock.leases import lease as lease_module
from celery_singleton_lock.leases.current import running_under
from celery_singleton_lock.leases.heartbeat import Heartbeat
from celery_singleton_lock.leases.lease import new_token
from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.memory.store import MemoryStore
from celery_singleton_lock.stores.records import Answer, Claim, Conflict, Facts
from tests.waiting import until

KEY = "singleton:v2:{shop.tasks.sync:00}"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(autouse=True)
def heart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeat]:
    """A heartbeat of this test's own in place of the process's."""
    heart = Heartbeat()
    monkeypatch.setattr(lease_module, "own_heartbeat", heart)
    yield heart
    with heart._lock:
        heart._pulses.clear()


def wanted(store: MemoryStore, ttl: float = 30.0) -> Lease:
    return Lease(store, Claim(KEY, new_token(), ttl))


def held(store: MemoryStore, ttl: float = 30.0) -> Lease:
    lease = wanted(store, ttl)
    assert lease.acquire() is None
    return lease


# Who looks after it.


def test_a_lease_is_renewed_by_the_processs_heartbeat_unless_it_is_given_another(
    store: MemoryStore, heart: Heartbeat
) -> None:
    other = Heartbeat()
    ours, theirs = wanted(store), Lease(store, Claim("another key", new_token(), 30.0), heartbeat=other)

    ours.acquire()
    theirs.acquire()

    assert heart.watched() == [ours._renewal]
    assert other.watched() == [theirs._renewal]
    theirs.release()


def test_a_lease_that_came_by_waiting_is_renewed_too(store: MemoryStore, heart: Heartbeat) -> None:
    lease = wanted(store)

    lease.wait(Conflict(KEY, ()))

    assert heart.watched() == [lease._renewal]


# What it tells.


def test_a_lease_is_held_between_its_grant_and_its_release(store: MemoryStore) -> None:
    lease = wanted(store)
    before = (lease.granted, lease.held, lease.unreleased, lease.remaining())

    lease.acquire()
    during = (lease.granted, lease.held, lease.unreleased)
    remaining = lease.remaining()
    lease.check()
    lease.release()

    assert before == (False, False, False, 0.0)
    assert during == (True, True, True)
    assert 29 < remaining < 30
    assert (lease.granted, lease.held, lease.unreleased, lease.remaining()) == (True, False, False, 0.0)
    with pytest.raises(LockLost, match=r"\(released\)"):
        lease.check()


def test_a_lease_can_be_released_once(store: MemoryStore) -> None:
    lease = held(store)

    assert lease.release() is Answer.DONE
    with pytest.raises(SingletonLockError, match="it was released already"):
        lease.release()


def test_a_lease_that_was_never_asked_for_cannot_be_released(store: MemoryStore) -> None:
    with pytest.raises(SingletonLockError):
        wanted(store).release()


def test_a_lease_that_was_refused_may_wait_for_its_turn(store: MemoryStore) -> None:
    first, second = held(store), wanted(store)

    conflict = second.acquire()
    unreleased = second.unreleased
    first.release()

    assert isinstance(conflict, Conflict)
    assert conflict.first.token == first.token
    assert not unreleased
    assert second.wait(conflict, 0) is None
    assert second.fence > first.fence


def test_a_lease_tells_how_long_it_was_waited_for() -> None:
    time = [1000.0]
    store = MemoryStore(now=lambda: time[0])
    first, second = held(store), wanted(store)

    conflict = second.acquire()
    time[0] += 7
    first.release()
    assert isinstance(conflict, Conflict)
    second.wait(conflict, 0)

    assert (first.waited, second.waited) == (0.0, 7.0)


def test_one_that_has_waited_in_vain_tells_when_that_was(store: MemoryStore) -> None:
    held(store)
    lease = wanted(store)
    conflict = lease.acquire()
    assert isinstance(conflict, Conflict)

    later = lease.wait(conflict, 0.05)

    assert isinstance(later, Conflict)
    assert 0.05 <= (later.at - conflict.at) / 1_000_000 < 5
    assert (lease.refused_at, lease.waited) == (conflict.at, 0.0)


def test_a_lease_is_current_inside_only(store: MemoryStore) -> None:
    outer, inner = held(store), Lease(store, Claim("another key", new_token(), 30.0))
    seen = [current_lease()]

    with running_under(outer):
        with running_under(inner):
            seen.append(current_lease())
        seen.append(current_lease())
    seen.append(current_lease())

    assert seen == [None, inner, outer, None]


# Waiting.


def test_a_free_lock_is_not_waited_for(store: MemoryStore) -> None:
    lease = wanted(store)

    assert lease.wait(Conflict(KEY, ()), 0) is None
    assert lease.held


def test_a_wait_ends_with_the_release(store: MemoryStore) -> None:
    holder, waiter = held(store), wanted(store)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(waiter.wait(Conflict(KEY, ()), 20)))
    waiting.start()
    until(lambda: store._locks[KEY].queue, "it waits")
    released_at = clock()

    # Long enough for the waiter to have fallen asleep: a later release is what wakes it.
    until(lambda: clock() > released_at + 0.2, "it sleeps")
    holder.release()
    waiting.join(20)

    assert answers == [None]
    assert waiter.held
    assert clock() - released_at < 10


def test_a_wait_ends_when_its_time_is_up_and_leaves_a_turn_to_give_back(store: MemoryStore) -> None:
    holder, waiter = held(store), wanted(store)
    began = clock()

    assert waiter.wait(Conflict(KEY, ()), 0.2) is not None
    took = clock() - began
    unreleased = waiter.unreleased
    answer = waiter.release()
    holder.release()

    assert 0.19 < took < 5
    assert unreleased
    assert not waiter.granted
    assert answer is Answer.DONE
    assert not waiter.lost
    assert wanted(store).acquire() is None


def test_a_wait_without_patience_asks_once(store: MemoryStore) -> None:
    held(store)
    waiter = wanted(store)
    began = clock()

    assert waiter.wait(Conflict(KEY, ()), 0) is not None
    assert clock() - began < 5


def test_a_wait_that_is_not_answered_leaves_something_to_give_back(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: object) -> None:
        raise StoreError("memory://", "no reply")

    waiter = wanted(store)
    monkeypatch.setattr(store, "queue", unanswered)

    with pytest.raises(StoreError):
        waiter.wait(Conflict(KEY, ()))

    assert waiter.unreleased
    assert not waiter.held


# Places that stay taken.


def test_a_lock_stays_taken_for_its_min_hold_after_the_release(store: MemoryStore) -> None:
    lease = Lease(store, Claim(KEY, new_token(), 30.0, min_hold=60.0, facts=Facts(task_id="id-of-a")))
    lease.acquire()

    answer = lease.release()
    conflict = wanted(store).acquire()

    assert answer is Answer.DONE
    assert not lease.lost
    assert isinstance(conflict, Conflict)
    assert conflict.first.task_id == "id-of-a"
    assert 50 < conflict.first.expires_in <= 60
