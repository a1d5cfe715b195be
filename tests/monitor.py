"""The commands of a server's clients, by MONITOR."""

import threading
from contextlib import suppress
from typing import Any, Self

import redis

from celery_singleton_lock.stores.redis.encoding import RELEASE, RENEW
from tests.servers import Server
from tests.waiting import until

_RELEASES = ("EVALSHA " + RELEASE.digest, "EVAL " + RELEASE.text[:40])
_RENEWALS = ("EVALSHA " + RENEW.digest, "EVAL " + RENEW.text[:40])


class Monitor:
    """Collects the commands of clients to *database*, or to all databases, during the block."""

    def __init__(self, server: Server, database: int | None = None) -> None:
        self._client = server.client()
        self._database = database
        self._commands: list[str] = []
        self._hears = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self._client.ping() and self._hears.is_set(), "the server tells what it is told")
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        # The ping wakes the thread, which has to close its own connection. If the server is gone, the thread has ended.
        with suppress(redis.RedisError):
            self._client.ping()
        self._thread.join(20)
        self._client.close()

    def renewals_after_release(self, token: str) -> int:
        """How many renewals with this token came after the first release with it."""
        mine = self.about(token)
        released = [number for number, command in enumerate(mine) if command.startswith(_RELEASES)]
        return sum(command.startswith(_RENEWALS) for command in mine[released[0] :]) if released else 0

    def about(self, *words: str) -> list[str]:
        return [command for command in list(self._commands) if any(word in command for word in words)]

    def _listen(self) -> None:
        with suppress(redis.RedisError), self._client.monitor() as monitor:
            while not self._ends.is_set():
                said: Any = monitor.next_command()
                self._hears.set()
                if said["client_type"] != "lua" and self._database in (None, said["db"]):
                    self._commands.append(said["command"])
