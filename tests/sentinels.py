"""Real deployments with Sentinel on the loopback: a master, its replicas and three sentinels, up within seconds."""

import os
import signal
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import redis

from celery_singleton_lock.stores.clock import clock
from tests.proxy import Proxy
from tests.servers import Server, started
from tests.waiting import until

NAME = "locks"
SENTINELS = 3
DOWN_AFTER = 1.0
# Milliseconds, as by default.
_PERIODS = {"INFO-PERIOD": 10000, "PUBLISH-PERIOD": 2000, "PING-PERIOD": 1000, "ASK-PERIOD": 1000}
# Only while the sentinels find one another: in a failover, those that have not heard of a promotion would undo it.
_HURRY = dict.fromkeys(_PERIODS, 100)
# Milliseconds for which a sentinel does nothing after it was stopped. After the default of 30 s no replica could be
# promoted, because it may have been without a master for at most ten times `down_after`.
_TILT = {"TILT-PERIOD": 3000}


class Sentinel(Server):
    """One sentinel process, which is configured once it runs."""

    def __init__(self, kind: str, *arguments: str) -> None:
        super().__init__(kind)
        # A sentinel writes what it learns into its configuration.
        settings = Path(self.directory) / "sentinel.conf"
        settings.write_text("".join(f"{line}\n" for line in (f"dir {self.directory}", *arguments)))
        program, *_ = self._command
        self._command = [program, str(settings), "--sentinel", "--port", str(self.port), "--bind", "127.0.0.1"]

    def ask(self, *words: Any) -> Any:
        with self.client() as client:
            return client.execute_command("SENTINEL", *words)

    def work_every(self, periods: dict[str, int]) -> None:
        self.ask("DEBUG", *(word for pair in periods.items() for word in pair))

    def watch(self, name: str, port: int, down_after: float, quorum: int = 2) -> None:
        self.ask("MONITOR", name, "127.0.0.1", port, quorum)
        options = {"down-after-milliseconds": round(1000 * down_after), "failover-timeout": 3000}
        for option, value in options.items():
            self.ask("SET", name, option, value)


class Deployment:
    """A master, two replicas and three sentinels. Its methods have the names of those of `Cluster`."""

    replicas = 2

    def __init__(
        self, kind: str, *arguments: str, behind: type[Proxy] | None = None, down_after: float = DOWN_AFTER
    ) -> None:
        self.kind = kind
        self._down_after = down_after
        self._arguments = ("--repl-diskless-sync-delay", "0", *arguments)
        self._behind = behind
        self.front: Proxy | None = None
        self._cleanup = ExitStack()
        self.servers: list[Server] = []
        self.sentinels: list[Sentinel] = []

    @property
    def hosts(self) -> list[str]:
        return [f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels]

    @property
    def url(self) -> str:
        return ";".join(f"sentinel://{host}" for host in self.hosts) + f"/0?master_name={NAME}"

    def start(self) -> None:
        self.servers = [self._started(Server(self.kind, *self._arguments))]
        port = self.servers[0].port
        if self._behind is not None:
            self.front = self._cleanup.enter_context(self._behind(port))
            port = self.front.port
        for _ in range(self.replicas):
            replica = Server(self.kind, *self._arguments, "--replicaof", "127.0.0.1", str(port))
            self.servers.append(self._started(replica))
        self.sentinels = [Sentinel(self.kind) for _ in range(SENTINELS)]
        for sentinel in self.sentinels:
            self._started(sentinel)
            sentinel.work_every({**_HURRY, **_TILT})
            sentinel.watch(NAME, port, self._down_after)
        until(self._is_complete, "the sentinels know one another, and all replicas are up to date", timeout=60)
        for sentinel in self.sentinels:
            sentinel.work_every(_PERIODS)

    def close(self) -> None:
        for server in (*self.servers, *self.sentinels):
            with suppress(AssertionError, ProcessLookupError):
                os.kill(server.pid, signal.SIGCONT)
        self._cleanup.close()

    def told(self, sentinel: Sentinel) -> dict[str, str]:
        fields = sentinel.ask("MASTER", NAME)
        return fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))

    @property
    def master(self) -> Server:
        ports = sorted(int(self.told(sentinel)["port"]) for sentinel in self.sentinels)
        return next(server for server in self.servers if server.port == ports[len(ports) // 2])

    @property
    def masters(self) -> list[Server]:
        return [self.master]

    def owner(self, key: str) -> Server:
        return self.master

    def kill(self, server: Server) -> None:
        server.stop()

    def pause(self, server: Server) -> None:
        os.kill(server.pid, signal.SIGSTOP)

    def fail_over(self, key: str = "") -> Server:
        before, asked_at = self.master, float("-inf")

        def is_over() -> bool:
            nonlocal asked_at
            # Ask again: the sentinel may have been stopped before, or may have known no replica to promote.
            if clock() > asked_at + 4:
                asked_at = clock()
                with suppress(redis.ResponseError):
                    self.sentinels[0].ask("FAILOVER", NAME)
            return self._all_name_another(before)

        until(is_over, "there is another master", timeout=60)
        return self.master

    def wait_for_another(self, before: Server) -> float:
        """Wait until all sentinels name another master. Return the seconds that it took."""
        began = clock()
        until(lambda: self._all_name_another(before), "there is another master", timeout=60)
        return clock() - began

    def _all_name_another(self, before: Server) -> bool:
        return all(int(self.told(sentinel)["port"]) != before.port for sentinel in self.sentinels)

    def _started(self, server: Server) -> Server:
        self._cleanup.callback(server.close)
        server.start()
        return server

    def _is_complete(self) -> bool:
        wanted = {
            "num-other-sentinels": str(SENTINELS - 1),
            "num-slaves": str(len(self.servers) - 1),
            "flags": "master",
        }
        told = [self.told(sentinel) for sentinel in self.sentinels]
        agreed = all(str(one[field]) == value for one in told for field, value in wanted.items())
        return agreed and all(map(_is_up_to_date, self.servers[1:]))


def _is_up_to_date(replica: Server) -> bool:
    with replica.client() as client:
        return bool(client.info("replication")["master_link_status"] == "up")


def deployed(kind: str, *arguments: str, **options: Any) -> AbstractContextManager[Deployment]:
    return started(Deployment(kind, *arguments, **options))
