"""A run costs the store two commands, and no key stays."""

from typing import Any

import pytest

from tests.acceptance import combined_app as combined
from tests.monitor import Monitor
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

APP = "tests.acceptance.combined_app"
PROMPTLY = 40
LOCKS = 2


@pytest.mark.parametrize("task", [combined.late["skip"], combined.by_policy["skip"]], ids=["late", "early"])
def test_a_run_that_met_no_copy_costs_two_commands_and_leaves_no_key(valkey: Server, task: Any) -> None:
    # A long ttl: a machine that pauses causes no renewal.
    with workers(APP, {"TEST_TTL": "60"}, concurrency=1):
        # The first one brings the scripts.
        assert task.delay("warm", 1).get(timeout=PROMPTLY) == 1
        with Monitor(valkey, LOCKS) as overheard:
            result = task.delay("k", 2)
            assert result.get(timeout=PROMPTLY) == 2
            # The only child has done with the one when it begins the other.
            assert task.delay("end", 3).get(timeout=PROMPTLY) == 3
            until(lambda: overheard.about(task.lock_key_for("end")), "all of it is heard")

    assert len(overheard.about(task.lock_key_for("k"), result.id)) == 2
    with valkey.client(LOCKS) as locks:
        kept = [key for key in locks.scan_iter("*") if "{" in key or locks.type(key) != "hash"]
    assert kept == []
