"""Two workers that share nothing but the network: many calls, and one that is killed in the midst of a run."""

import time

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
