"""Waiting until replicas have what a script has written, before its answer counts."""

from collections.abc import Sequence
from typing import Any

from redis import exceptions

from celery_singleton_lock.stores.base import clock
from celery_singleton_lock.stores.redis.script import Script
from celery_singleton_lock.stores.redis.wire import Wire

# Seconds; less than a connection waits for a reply. The rest is for another try.
_LONGEST_WAIT = 0.5


class TooFewReplicas(exceptions.ConnectionError):
    """The master has written it, but too few replicas have acknowledged the write in time."""


class Replicas:
    """The number of replicas that have to acknowledge a write.

    WAIT counts the replicas that have the writes of its own connection, and of no other one. So it is sent with the
    script, which costs no round trip. And a script that is repeated has to write again: acquire.lua and renew.lua do.

    Arguments:
        number: How many.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def run(
        self, wire: Wire, script: Script, keys: Sequence[str], arguments: Sequence[str], timeout: float
    ) -> tuple[Any, int]:
        """Run a script; returns its reply, and how many replicas have its writes."""
        calls = [(keys, arguments)]

        def ask(one: Wire, left: float) -> tuple[list[Any], int]:
            return self._run_many(one, wire.spelled(script), calls, left)

        (reply,), acknowledged = wire.at(keys[0], ask, timeout)
        return reply, acknowledged

    def run_many(
        self, wire: Wire, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str]]], timeout: float
    ) -> list[Any]:
        """Run a script several times in one round trip.

        Raises:
            TooFewReplicas: The script has run all the same.
        """
        replies, acknowledged = self._run_many(wire, script, calls, timeout)
        self.check(acknowledged)
        return replies

    def try_out(self, wire: Wire, key: str, timeout: float) -> None:
        """Write to *key*, which soon expires, and wait.

        Raises:
            RedisError: The server does not let us, or has too few replicas.
        """

        def ask(one: Wire, left: float) -> list[Any]:
            return one.call_many([("HSET", key, "a", "0"), ("PEXPIRE", key, "1000"), self.wait(left)], left)

        *_, acknowledged = wire.at(key, ask, timeout)
        self.check(acknowledged)

    def check(self, acknowledged: int) -> None:
        """Return if so many are enough.

        Raises:
            TooFewReplicas: They are not enough.
        """
        if acknowledged < self.number:
            raise TooFewReplicas(
                f"acknowledged by {acknowledged} of its replicas, not by singleton_lock_replicas={self.number}"
            )

    def checked(self, replies: Sequence[Any]) -> list[Any]:
        """The replies without that of WAIT, which is the last; if too few replicas have it, each is that error."""
        *others, acknowledged = replies
        try:
            if isinstance(acknowledged, exceptions.RedisError):
                raise acknowledged
            self.check(acknowledged)
        except exceptions.RedisError as error:
            return [reply if isinstance(reply, exceptions.RedisError) else error for reply in others]
        return others

    def wait(self, timeout: float) -> tuple[str, ...]:
        """The command to send behind a script, if there are so many seconds in all."""
        # Never 0, which means for ever.
        return "WAIT", str(self.number), str(max(1, round(1000 * min(timeout / 2, _LONGEST_WAIT))))

    def _run_many(
        self, wire: Wire, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str]]], timeout: float
    ) -> tuple[list[Any], int]:
        give_up_at = clock() + timeout
        plain = [(str(len(keys)), *keys, *arguments) for keys, arguments in calls]
        known = [("EVALSHA", script.digest, *call) for call in plain]
        try:
            *replies, acknowledged = wire.call_many([*known, self.wait(timeout)], timeout)
        except exceptions.NoScriptError:
            left = give_up_at - clock()
            first = "EVAL", script.text, *plain[0]
            *replies, acknowledged = wire.call_many([first, *known[1:], self.wait(left)], left)
        return replies, acknowledged
