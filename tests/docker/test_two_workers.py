"""Two workers that share nothing but the network: many calls, kills and restarts in the midst of a run."""

import time

import pytest

from celery_singleton_lock import LockLost
from tests.docker import tasks
from tests.docker.conftest import Site
from tests.recorder import Event, overlaps

# The longest delay of a call that is requeued is two seconds, and a busy machine may take one more.
SLACK = 3.0


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def fences_grow(events: list[Event]) -> bool:
    fences = [event.facts["fence"] for event in events if event.name == "enter"]
    return fences == sorted(set(fences))


def test_many_calls_all_run_and_no_two_at_once_which_without_the_lock_they_do(site: Site) -> None:
    with_lock = [tasks.locked.delay("with", number, seconds=0.1) for number in range(8)]
    without = [tasks.unlocked.delay("without", number, seconds=0.5) for number in range(8)]

    for calls in (with_lock, without):
        assert [call.get(timeout=60) for call in calls] == list(range(8))
    events = site.recorder.events()
    assert {later.key for _, later in overlaps(events)} == {"without"}
    assert fences_grow([event for event in events if event.key == "with"])
    assert len({event.facts["worker"] for event in events if event.name == "enter"}) == 2
    assert site.lock_keys() == []


def test_after_a_worker_is_killed_the_next_call_runs_within_the_ttl_and_the_killed_one_again(site: Site) -> None:
    killed = tasks.acked_late.delay("k", 1, hang=60)
    first = site.begun()
    assert site.lock_keys()
    assert site.keys_without_expiry() == []
    site.worker_of(first).kill()
    death = Event("died", first.key, first.run, now(), first.pid, {})
    following = tasks.acked_late.delay("k", 2)

    assert (following.get(timeout=30), killed.get(timeout=30)) == (2, 1)
    enters = site.recorder.events("enter")
    assert len(enters) == 3
    assert enters[1].at - death.at < tasks.TTL + SLACK
    assert enters[1].facts["took_over"]
    assert fences_grow(enters)
    assert overlaps(sorted([*site.recorder.events(), death], key=lambda event: event.at)) == []
    assert site.keys_without_expiry() == []


def test_a_run_goes_on_while_the_store_is_restarted_with_its_data(site: Site) -> None:
    running = tasks.locked.delay("k", 1, seconds=tasks.TTL + 1)
    site.begun()
    site.store.container.client.save()
    site.store.restart()
    assert site.lock_keys()
    following = tasks.locked.delay("k", 2)

    assert (running.get(timeout=30), following.get(timeout=30)) == (1, 2)
    events = site.recorder.events()
    assert [event.name for event in events] == ["enter", "leave"] * 2
    assert fences_grow(events)
    assert site.keys_without_expiry() == []


def test_a_run_is_told_when_the_store_is_restarted_without_its_data(site: Site) -> None:
    running = tasks.locked.delay("k", 1, seconds=60)
    site.begun()
    site.store.restart()

    with pytest.raises(LockLost):
        running.get(timeout=20)
    assert tasks.locked.delay("k", 2).get(timeout=30) == 2
    events = site.recorder.events()
    assert overlaps(events) == []
    assert fences_grow(events)
    assert site.keys_without_expiry() == []


def test_a_worker_that_is_restarted_ends_its_run_first_and_comes_back(site: Site) -> None:
    running = tasks.locked.delay("k", 1, seconds=2)
    restarted = site.worker_of(site.begun())
    other = next(worker for worker in site.workers if worker is not restarted)
    following = tasks.locked.delay("k", 2)
    restarted.restart()

    assert (running.get(timeout=30), following.get(timeout=30)) == (1, 2)
    other.kill()
    assert tasks.locked.delay("k", 3).get(timeout=30) == 3
    events = site.recorder.events()
    assert [event.name for event in events] == ["enter", "leave"] * 3
    assert restarted.runs(events[-2])
    assert fences_grow(events)
    assert site.keys_without_expiry() == []
