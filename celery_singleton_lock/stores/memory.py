"""Locks in the memory of one process, for tests and eager mode."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Self

from fakeredis import FakeRedisConnection, FakeServer
from fakeredis._core import Database
from fakeredis._socket import FakeSocket
from redis import ConnectionPool

from celery_singleton_lock.stores.clock import clock
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.store import Store

# Fail here without lupa, otherwise fakeredis would report an unknown command EVALSHA.
import_module("lupa")


class MemoryStore(Store):
    is_of_one_process = True

    def __init__(self) -> None:
        super().__init__("memory://", {})

    def _connect(self, url: str, options: Mapping[str, Any]) -> Connections:  # noqa: ARG002 (memory:// has no options)
        self._server = Server()
        return OwnMemory(self._server, self._refuse_a_copy)

    def clone(self) -> Self:
        return self

    def advance(self, seconds: float) -> None:
        """Move the clock ahead, and wake all waiters."""
        self._server.ahead += seconds
        for channel in self.call("PUBSUB", "CHANNELS"):
            self.call("PUBLISH", channel, "")

    def time(self, key: str) -> int:  # noqa: ARG002 (all keys have one server)
        return round(self._server.time() * 1_000_000)

    def _refuse_a_copy(self, pid: int) -> None:
        """Called after a fork from *pid*, before the copied locks are used. May raise."""

    def _compare(self, key: str, now: int, sent_at: float) -> None:
        """Report no step of the clock, because `advance` sets it."""


class Server(FakeServer):
    """A server with a clock of its own, so a test that freezes the wall clock changes no expiry."""

    def __init__(self) -> None:
        super().__init__(version=(7, 4))
        # Reentrant, because a signal handler may use the store while its thread is in a command.
        self.lock = threading.RLock()  # type: ignore[assignment]
        self.dbs = defaultdict(lambda: _Database(self.lock, self.time))
        # Make the database now, otherwise two threads at its first use could each make their own.
        self.dbs[0] = _Database(self.lock, self.time)
        self.ahead = time.time() - clock()

    def after_fork(self) -> None:
        # A thread of the parent may hold the copied locks, and would never release them here.
        self.lock = threading.RLock()  # type: ignore[assignment]
        for database in self.dbs.values():
            database.condition = threading.Condition(self.lock)
        vars(self).pop("_lua_runtime", None)

    def time(self) -> float:
        return self.ahead + clock()


class _Database(Database):
    """Expiry follows the server's clock, not the `time` that fakeredis sets before each command."""

    def __init__(self, lock: Any, now: Callable[[], float]) -> None:
        self._now = now
        super().__init__(lock)

    @property
    def time(self) -> float:
        return self._now()

    @time.setter
    def time(self, now: float) -> None:
        pass


class _Socket(FakeSocket):
    _server: Server

    def time(self) -> list[bytes]:
        seconds, microseconds = divmod(round(self._server.time() * 1_000_000), 1_000_000)
        return [b"%d" % seconds, b"%d" % microseconds]


class _Connection(FakeRedisConnection):
    def _connect(self) -> _Socket:
        assert self._server is not None
        return _Socket(self._server, client_class=self._client_class, db=0, client_info=self._client_info)


class OwnMemory(Connections):
    looks_every = 0.01

    def __init__(self, server: Server, refuse_a_copy: Callable[[int], None]) -> None:
        self._server = server
        self._refuse_a_copy = refuse_a_copy
        # `redis_connect_func` replaces AUTH and CLIENT SETINFO, which a server in this process does not need.
        arguments: dict[str, Any] = {"decode_responses": True, "protocol": 2, "redis_connect_func": lambda _: None}
        pool = ConnectionPool(connection_class=_Connection, server=server, **arguments)
        super().__init__(pool, "memory://")

    def _begin(self) -> None:
        if self._pid:
            self._refuse_a_copy(self._pid)
            self._server.after_fork()
        super()._begin()

    def open(self, until: float) -> Any:
        if self._pid != os.getpid():
            self._begin()
        return super().open(until)
