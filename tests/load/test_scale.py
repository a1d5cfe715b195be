"""What one process and one worker can carry: a small edition of `benchmarks.scale`, with bounds that hold anywhere."""

import pytest

from benchmarks import crowd, many
from benchmarks.scale import in_a_process

SENT = 60
# Of those that come again, at most, by their shortest delays.
ARRIVALS_PER_SECOND = 100


def test_thousands_of_leases_of_one_process_are_kept_by_one_thread_and_two_connections() -> None:
    found = in_a_process(many.leases, 3000, 15.0, 12.0)

    assert found["lost"] == 0
    assert found["sockets"] == 2
    assert found["threads"] <= 2
    assert found["least remaining"] > 0
    assert found["bytes of a lease"] < 20_000
    assert found["processor"] < 0.5


def test_a_worker_does_not_grow_with_the_tasks_it_has_run() -> None:
    found = in_a_process(many.tasks, 300, 1500, 2)
    ours, plain = found["singleton"], found["plain"]

    assert ours["threads after 1500"] <= ours["threads after 300"] + 1
    assert ours["descriptors after 1500"] <= ours["descriptors after 300"] + 2
    # The main process grows with its first two thousand tasks, and hardly after them.
    assert ours["bytes after 1500"] - ours["bytes after 300"] < 25_000_000
    assert ours["threads after 1500"] <= plain["threads after 1500"] + 3
    assert found["connections"]["pool process"] == 2


@pytest.mark.parametrize("policy", ["reschedule", "join", "wait", "rerun"])
def test_what_waits_for_one_key_asks_within_bounds(policy: str) -> None:
    seen = in_a_process(crowd.of_one_message, policy, (SENT,), 2.0)["crowds"][str(SENT)]
    commands = {name: seen["rates"][name]["commands"] for name in crowd.SERVERS}

    in_queue = SENT if policy in ("reschedule", "join") else SENT - crowd.PROCESSES + 1 if policy == "wait" else 1
    # One that comes again at this moment counts twice, or not at all.
    assert abs(seen["waiting"] - in_queue) <= 5
    if policy in ("reschedule", "join"):
        # Ten commands of the broker for each arrival, five of the backend, seven of the store.
        assert commands["broker"] <= 12 * ARRIVALS_PER_SECOND
        assert commands["backend"] <= 6 * ARRIVALS_PER_SECOND
        assert commands["store"] <= 8 * ARRIVALS_PER_SECOND
    else:
        assert commands["broker"] < 60
        assert commands["backend"] < 30
        assert commands["store"] < 60
