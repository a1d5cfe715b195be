"""Waiting until replicas have what a script has written, before its answer counts."""

from collections.abc import Sequence
from typing import Any

from redis import exceptions

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.wire import Script, Wire

# Seconds, less than for how long a connection waits for a reply. What is left is for another try.
_LONGEST_WAIT = 0.5


class TooFewReplicas(exceptions.ConnectionError):
    """The master has written it, and fewer replicas than it takes have acknowledged that in time."""


class Replicas:
    """So many replicas that have to acknowledge a write.

    WAIT counts those that have what its own connection has written, and nothing else. So it goes with the script, which
    costs no round trip, and a script that is repeated has to write again: acquire.lua and renew.lua do.

    Arguments:
        number: How many.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def run(
        self, wire: Wire, script: Script, keys: Sequence[str], arguments: Sequence[str], timeout: float
    ) -> tuple[Any, int]:
        """Run a script; its reply, and how many replicas have what it has written."""
        (reply,), acknowledged = self._run_many(wire, script, [(keys, arguments)], timeout)
        return reply, acknowledged

    def run_many(
        self, wire: Wire, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str]]], timeout: float
    ) -> list[Any]:
        """Run a script several times in one round trip.

        Raises:
            TooFewReplicas: It has run.
        """
        replies, acknowledged = self._run_many(wire, script, calls, timeout)
        self.check(acknowledged)
        return replies

    def try_out(self, wire: Wire, key: str, timeout: float) -> None:
        """Write to *key*, which is soon gone, and wait.

        Raises:
            RedisError: The server does not let us, or has too few replicas.
        """
        _, acknowledged = wire.call_many([("SET", key, "", "PX", "1000"), self._wait(timeout)], timeout)
        self.check(acknowledged)

    def check(self, acknowledged: int) -> None:
        """Return if so many are enough.

        Raises:
            TooFewReplicas: They are not.
        """
        if acknowledged < self.number:
            raise TooFewReplicas(
                f"acknowledged by {acknowledged} of its replicas, not by singleton_lock_replicas={self.number}"
            )

    def _run_many(
        self, wire: Wire, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str]]], timeout: float
    ) -> tuple[list[Any], int]:
        give_up_at = clock() + timeout
        plain = [(str(len(keys)), *keys, *arguments) for keys, arguments in calls]
        known = [("EVALSHA", script.digest, *call) for call in plain]
        try:
            *replies, acknowledged = wire.call_many([*known, self._wait(timeout)], timeout)
        except exceptions.NoScriptError:
            left = give_up_at - clock()
            first = "EVAL", script.text, *plain[0]
            *replies, acknowledged = wire.call_many([first, *known[1:], self._wait(left)], left)
        return replies, acknowledged

    def _wait(self, timeout: float) -> tuple[str, ...]:
        # Never 0, which means for ever.
        return "WAIT", str(self.number), str(max(1, round(1000 * min(timeout / 2, _LONGEST_WAIT))))
