"""A store of locks, a broker, results, and workers that reach the first two through proxies."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from tests.fire.topologies import TOPOLOGIES
from tests.proxy import Proxy
from tests.rabbit import Rabbit
from tests.runs.record import Record
from tests.runs.watch import group_of, send
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker

HOSTS, CONCURRENCY = 3, 4
# All workers but the first are shut down cold by SIGQUIT; the first gives its bodies so long.
SOFT_SHUTDOWN = 1.5
# A worker that ends while it has no connection reads no more results of its children, and billiard lets these wait for
# half a minute.
_UNREAD = 35.0
# A warm shutdown waits for all bodies, and for the calls that wait in a pool.
LONGEST_WARM_SHUTDOWN = 40.0 + _UNREAD
LONGEST_COLD_SHUTDOWN = 15.0 + _UNREAD


class Store(Server):
    """The store of locks: what it has answered survives a SIGKILL, unless its data is thrown away."""

    def __init__(self, kind: str) -> None:
        # Written before each answer, though not to the disk: the machine stays up.
        super().__init__(kind, "--appendonly", "yes", "--appendfsync", "no", "--repl-diskless-sync-delay", "0")

    def replica(self) -> "Store":
        other = Store(self.kind)
        other.start()
        with other.client() as client:
            client.replicaof("127.0.0.1", self.port)
            until(lambda: client.info("replication").get("master_link_status") == "up", "the replica has all data")
        return other

    def give_way_to(self, replica: "Store") -> None:
        with self.client() as client, replica.client() as heir:
            client.execute_command("FAILOVER", "TO", "127.0.0.1", replica.port)
            until(lambda: heir.info("replication")["role"] == "master", "the replica takes over")

    def forget(self) -> None:
        shutil.rmtree(Path(self.directory) / "appendonlydir")


class Host:
    def __init__(self, number: int, locks: Proxy | None, broker: Proxy, env: dict[str, str], logs: Path) -> None:
        self.number = number
        self._locks = locks
        self.broker = broker
        self._env = env
        self._logs = logs
        self._started = 0
        self._ready = False
        self._worker: Worker | None = None

    def __str__(self) -> str:
        return f"worker {self.number}"

    @property
    def locks(self) -> Proxy:
        assert self._locks is not None
        return self._locks

    def heal(self) -> None:
        for way in (self._locks, self.broker):
            if way is not None:
                way.forward()

    @property
    def worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    @property
    def soft(self) -> bool:
        return "FIRE_SOFT_SHUTDOWN" in self._env

    def start(self) -> None:
        self._started += 1
        self._ready = False
        self._worker = Worker("tests.fire.app", self._env, concurrency=CONCURRENCY).start()

    def is_ready(self) -> bool:
        self._ready = self._ready or " ready." in self.worker.log()
        return self._ready

    def is_alive(self) -> bool:
        try:
            self.worker.wait(0)
        except subprocess.TimeoutExpired:
            return True
        return False

    def has_lost_its_way(self) -> bool:
        """Its main process cannot read what a child has written, and does not end."""
        return "Unrecoverable error: UnpicklingError(" in self.worker.log()

    def stop(self) -> None:
        if self.is_alive():
            self.worker.send(signal.SIGTERM)

    def hangs_in_the_lock(self, children: Iterable[int]) -> bool:
        """Have all its processes write their stacks to its log; whether the main thread of any is in our code."""
        send(self.worker.pid, signal.SIGUSR2)
        with suppress(AssertionError):
            until(lambda: "in _run_module_as_main" in _last_dump(self.worker.log()), "it tells its stack", timeout=5)
        log = self.worker.log()
        for pid in children:
            if group_of(pid) == self.worker.pid:
                send(pid, signal.SIGUSR2)
        time.sleep(1.0)
        dumps = [_last_dump(log), *self.worker.log()[len(log) :].split("Current thread")[1:]]
        return any("/celery_singleton_lock/" in dump for dump in dumps)

    def clear(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            (self._logs / f"worker-{self.number}-{self._started}.log").write_text(self._worker.log())
            self._worker.close()
            self._worker = None


def _last_dump(log: str) -> str:
    """The stack of the thread that got the signal, which is the main thread; the others are written before it."""
    return log.rpartition("Current thread")[2]


class Stage:
    def __init__(self, out: Path, store: str, *, sabotage: bool) -> None:
        self._stack = ExitStack()
        self._out = out
        self.path = str(out / "record.jsonl")
        Path(self.path).unlink(missing_ok=True)
        self.record = Record(self.path)
        self.topology = TOPOLOGIES[store]() if store in TOPOLOGIES else None
        self.locks = Store("valkey" if self.topology else store)
        self.results = Server("valkey")
        self.broker = Rabbit()
        self._env = {"TEST_RECORD": self.path, "FIRE_RESULTS": self.results.url}
        if sabotage:
            self._env["FIRE_SABOTAGE"] = "1"
        self.hosts: list[Host] = []

    @property
    def url_of_locks(self) -> str:
        """As nobody is kept from it."""
        return self._way.url if self.topology is None else self.topology.url

    def masters(self) -> list[Server]:
        return [self.locks] if self.topology is None else self.topology.masters()

    def move_the_locks(self) -> Store:
        """Have another server take over from the store of locks; who is connected stays at the old one."""
        old, heir = self.locks, self.locks.replica()
        self._stack.callback(heir.close)
        old.give_way_to(heir)
        self.locks = heir
        for way in (self._way, *[host.locks for host in self.hosts]):
            way.move(heir.port)
        return old

    def supervise(self) -> None:
        """Restart each worker that has ended or is stuck, as a supervisor would, and record that."""
        for host in self.hosts:
            if not host.is_alive():
                self.record.write("gone", what=f"{host} has ended by itself")
            elif host.has_lost_its_way():
                self.record.write("stuck", what=f"{host} with half a message of a child", in_celery=True)
            else:
                continue
            host.clear()
            host.start()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        for server in (self.topology or self.locks, self.results, self.broker):
            self._stack.callback(server.close)
            server.start()
        if self.topology is not None:
            self._env |= {"FIRE_REPLICAS": str(self.topology.replicas)}
        self._way = self._stack.enter_context(Proxy(self.locks.port))
        # For the tasks as this process publishes them.
        os.environ.update(FIRE_BROKER=self.broker.url, FIRE_LOCKS=self.url_of_locks, **self._env)
        os.environ.pop("FIRE_SABOTAGE", None)
        for number in range(1, HOSTS + 1):
            self.hosts.append(self._host(number))
        for host in self.hosts:
            self._stack.callback(host.clear)
            host.start()
        for host in self.hosts:
            until(host.is_ready, f"{host} is ready", timeout=60)

    def _host(self, number: int) -> Host:
        locks = None if self.topology else self._stack.enter_context(Proxy(self.locks.port))
        broker = self._stack.enter_context(Proxy(self.broker.port))
        env = {
            **self._env,
            "FIRE_LOCKS": self.url_of_locks if locks is None else locks.url,
            "FIRE_BROKER": self.broker.url.replace(str(self.broker.port), str(broker.port)),
        }
        if number == 1:
            env["FIRE_SOFT_SHUTDOWN"] = str(SOFT_SHUTDOWN)
        if number == 2:
            env["FIRE_CANCEL"] = "1"
        return Host(number, locks, broker, env, self._out)
