"""The nodes as processes of this machine: no engine needed, and a debugger can reach them."""

import os
import signal
from dataclasses import dataclass

import redis

from tests.recorder import Event
from tests.servers import Server
from tests.workers import Worker


@dataclass(frozen=True)
class WorkerProcess:
    worker: Worker

    def runs(self, event: Event) -> bool:
        return os.getpgid(event.pid) == self.worker.pid

    def kill(self) -> None:
        self.worker.kill()

    def restart(self) -> None:
        self.worker.send(signal.SIGTERM)
        self.worker.wait()
        self.worker.start().ready()


@dataclass(frozen=True)
class StoreProcess:
    server: Server

    def client(self) -> "redis.Redis":
        return self.server.client()

    def restart(self) -> None:
        self.server.stop()
        self.server.start()
