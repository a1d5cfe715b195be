"""What a run costs the store: two commands, and no key that stays."""

import threading
from contextlib import suppress
from typing import Any

import pytest
import redis

from tests.acceptance import combined_app as combined
from tests.servers import Server
from tests.waiting import until
from tests.workers import workers

APP = "tests.acceptance.combined_app"
PROMPTLY = 10
LOCKS = 2


class Overheard:
    """The commands that clients send to the locks' database."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self.commands: list[str] = []
        self._heard = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        until(lambda: self._client.ping() and self._heard.is_set(), "the server tells what it is told")

    def about(self, *words: str) -> list[str]:
        """Those that have one of the words in them."""
        return [command for command in list(self.commands) if any(word in command for word in words)]

    def close(self) -> None:
        self._client.close()

    def _listen(self) -> None:
        with suppress(redis.RedisError, OSError, ValueError), self._client.monitor() as monitor:
            for said in monitor.listen():
                self._heard.set()
                if said["db"] == LOCKS and said["client_type"] != "lua":
                    self.commands.append(said["command"])


@pytest.mark.parametrize("task", [combined.late["skip"], combined.by_policy["skip"]], ids=["late", "early"])
def test_a_run_that_met_no_copy_costs_two_commands_and_leaves_no_key(tasks: Any, valkey: Server, task: Any) -> None:
    # No renewal, even if the machine pauses meanwhile.
    env = {"TEST_STORE": valkey.url, "TEST_TTL": "60", "C_FORCE_ROOT": "1"}
    with workers(APP, env, 1, concurrency=1):
        # The first one brings the scripts.
        assert task.delay("warm", 1).get(timeout=PROMPTLY) == 1
        overheard = Overheard(valkey)
        result = task.delay("k", 2)
        assert result.get(timeout=PROMPTLY) == 2
        # The only child has done with the one when it begins the other.
        assert task.delay("end", 3).get(timeout=PROMPTLY) == 3
        until(lambda: overheard.about(task.lock_key_for("end")), "all of it is heard")
        overheard.close()

    assert len(overheard.about(task.lock_key_for("k"), result.id)) == 2
    with valkey.client(LOCKS) as locks:
        kept = [key for key in locks.scan_iter("*") if "{" in key or locks.type(key) != "hash"]
    assert kept == []
