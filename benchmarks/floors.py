"""The least that a lock costs: two commands, packed in advance, by a connection that is used by hand.

They are sent where the library sends its own, in a task's `__call__`, and both replies are waited for. The rest of the
library's cost in the same run is the price of its promises; this part, nobody can save.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from celery import Task

from benchmarks.candidates import client_of

# The name of a setting: the database where the calls of a real task are left for those who play them again.
RECORDED_AT = "floor_recorded_at"
RECORDED = "recorded"

TTL = 60


class Floor(Task):
    """A lock without a library."""

    abstract = True
    _prepared: tuple[Any, list[bytes], list[bytes]] | None = None

    def __call__(self, *args: Any) -> Any:
        """One command before the body, and one after it."""
        connection, before, after = self._prepared or self._prepare()
        connection.send_packed_command(before, check_health=False)
        connection.read_response()
        try:
            return self.run(*args)
        finally:
            connection.send_packed_command(after, check_health=False)
            connection.read_response()

    def commands(self) -> tuple[Sequence[str], Sequence[str]]:
        """The two, for a lock that no other process uses."""
        raise NotImplementedError

    def _prepare(self) -> tuple[Any, list[bytes], list[bytes]]:
        """In the pool process, at its first task."""
        connection = client_of(self.app.conf["floor_locks"]).connection_pool.get_connection()
        before, after = (connection.pack_command(*command) for command in self.commands())
        connection.send_packed_command([*before, *after], check_health=False)
        _, released = connection.read_response(), connection.read_response()
        assert released == 1, "the second frees what the first has taken"
        self._prepared = connection, before, after
        return self._prepared


class WithSetAndDel(Floor):
    """The least that could be called a lock; it may free that of somebody else."""

    abstract = True

    def commands(self) -> tuple[Sequence[str], Sequence[str]]:
        """Without a script."""
        key = f"floor:{os.getpid()}"
        return ("SET", key, f"{os.getpid():032}", "NX", "PX", str(1000 * TTL)), ("DEL", key)


class WithSetWhenPublished(Task):
    """The least for a call that is unique in the queue: taken by its publisher, freed by the worker."""

    abstract = True
    _connection: Any = None

    def apply_async(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """As long as everybody publishes by this."""
        self._send(b"*6\r\n$3\r\nSET\r\n$16\r\n%016d\r\n$1\r\n1\r\n$2\r\nNX\r\n$2\r\nPX\r\n$5\r\n60000\r\n" % args[0])
        return super().apply_async(args, *rest, **options)

    def __call__(self, number: int) -> Any:
        """Freed after the body."""
        try:
            return self.run(number)
        finally:
            self._send(b"*2\r\n$3\r\nDEL\r\n$16\r\n%016d\r\n" % number)

    def _send(self, packed: bytes) -> None:
        if self._connection is None:
            self._connection = client_of(self.app.conf["floor_locks"]).connection_pool.get_connection()
        self._connection.send_packed_command([packed], check_health=False)
        assert self._connection.read_response() in ("OK", 1), "each call has a key of its own"


class WithOurScripts(Floor):
    """The commands of one of our workers for a task, word for word, but on a key of this process."""

    abstract = True

    def commands(self) -> tuple[Sequence[str], Sequence[str]]:
        """As recorded; the server knows the scripts from then."""
        acquire, release = json.loads(client_of(self.app.conf[RECORDED_AT]).get(RECORDED))
        return on_a_key_of_its_own(acquire), on_a_key_of_its_own(release)


def on_a_key_of_its_own(command: Sequence[str]) -> list[str]:
    """`EVALSHA digest 1 key ...` with another key, as long as the first."""
    verb, digest, number, key, *rest = command
    own = f"{os.getpid():010}"
    return [verb, digest, number, f"{key[: -len(own) - 1]}{own}{key[-1]}", *rest]
