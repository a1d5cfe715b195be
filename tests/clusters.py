"""Real clusters on the loopback: three masters and a replica of each, up within seconds."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any

import redis
from redis.crc import key_slot

from celery_singleton_lock.stores.clock import clock
from tests.servers import Server, binary, free_port, reserved, started
from tests.waiting import until

NODE_TIMEOUT = 1.0
# Seconds. No failover until a test wants one, even if a server is silent on a busy machine.
_CALM = 60.0
SLOTS = 16384
_MASTERS = 3


def slot_of(key: str) -> int:
    return key_slot(key.encode())


class Node(Server):
    """One server of a cluster, with a port for the cluster bus, and one for TLS if *tls* is given."""

    def __init__(
        self, kind: str, *arguments: str, tls: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> None:
        # May skip the test, so do this before a port is reserved: an unclosed socket would warn in a later test.
        binary(kind)
        # The default port of the cluster bus, 10,000 higher, may be taken or not exist.
        self._reserved_bus = reserved()
        self.bus = int(self._reserved_bus.getsockname()[1])
        settings = {
            "cluster-enabled": "yes",
            "cluster-port": self.bus,
            "cluster-node-timeout": round(1000 * _CALM),
            # With 0, a replica that lost its master long ago may be promoted, too.
            "cluster-replica-validity-factor": 0,
            "repl-diskless-sync-delay": 0,
        }
        words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
        self.tls_port = free_port() if tls else None
        if self.tls_port is not None:
            # Without `tls-cluster`, the nodes announce no ports for TLS.
            words += ["--tls-port", str(self.tls_port), "--tls-cluster", "yes", *tls]
        super().__init__(kind, *words, *arguments, env=env)

    def close(self) -> None:
        super().close()
        self._reserved_bus.close()

    def ask(self, *words: Any) -> Any:
        with self.client() as client:
            return client.execute_command("CLUSTER", *words)

    @property
    def id(self) -> str:
        return str(self.ask("MYID"))

    @property
    def info(self) -> dict[str, str]:
        told = self.ask("INFO")
        return told if isinstance(told, dict) else dict(line.split(":", 1) for line in told.split("\r\n") if line)

    def meet(self, other: "Node") -> None:
        self.ask("MEET", "127.0.0.1", other.tls_port or other.port, other.bus)

    def slots(self) -> list[tuple[int, int, int]]:
        """The ranges of slots that this node knows: first slot, last slot, and the owner's port."""
        with self.client() as client:
            rows = client.connection_pool.make_connection()
            try:
                rows.send_command("CLUSTER", "SLOTS")
                return [(int(first), int(last), int(owner[1])) for first, last, owner, *_ in rows.read_response()]
            finally:
                rows.disconnect()


class Cluster:
    def __init__(
        self,
        kind: str,
        *arguments: str,
        replicas: int = 1,
        tls: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self._cleanup = ExitStack()
        self.replicas = replicas
        envs = {_MASTERS - 1: env}
        self.nodes = [
            Node(kind, *arguments, tls=tls, env=envs.get(number)) for number in range(_MASTERS * (1 + replicas))
        ]
        for node in self.nodes:
            self._cleanup.callback(node.close)

    @property
    def hosts(self) -> list[str]:
        return [f"127.0.0.1:{node.port}" for node in self.nodes]

    @property
    def url(self) -> str:
        return f"redis+cluster://{';'.join(self.hosts[:_MASTERS])}"

    def start(self) -> None:
        bounds = [SLOTS * number // _MASTERS for number in range(_MASTERS + 1)]
        for number, node in enumerate(self.nodes):
            node.start()
            node.ask("SET-CONFIG-EPOCH", number + 1)
        for node, (first, behind) in zip(self.nodes, pairwise(bounds), strict=False):
            node.ask("ADDSLOTSRANGE", first, behind - 1)
        # Let each node meet all others, because gossip would take seconds.
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    node.meet(other)
        until(lambda: all(self._knows_all(node) for node in self.nodes), "they know one another", timeout=60)
        for number, replica in enumerate(self.nodes[_MASTERS:]):
            replica.ask("REPLICATE", self.nodes[number % _MASTERS].id)
        until(lambda: all(map(self._is_ready, self.nodes)), "the cluster is ready", timeout=60)

    def close(self) -> None:
        for node in self.nodes:
            with suppress(AssertionError, ProcessLookupError):
                os.kill(node.pid, signal.SIGCONT)
        self._cleanup.close()

    @property
    def masters(self) -> list[Node]:
        """The nodes with slots, as the first node that answers sees them."""
        ports = {port for *_, port in self._view()}
        return [node for node in self.nodes if node.port in ports]

    def owner(self, key: str) -> Node:
        slot = slot_of(key)
        port = next(port for first, last, port in self._view() if first <= slot <= last)
        return next(node for node in self.nodes if node.port == port)

    def replica_of(self, master: Node) -> Node:
        with master.client() as client:
            port = int(client.info("replication")["slave0"]["port"])
        return next(node for node in self.nodes if node.port == port)

    def wait_for_another(self, before: Node) -> float:
        """Wait until no other node takes *before* for a master. Return the seconds that it took."""
        began = clock()
        others = [node for node in self.nodes if node is not before]

        def name_another() -> bool:
            return not any(port == before.port for node in others for *_, port in node.slots())

        until(name_another, "there is another master", timeout=60)
        return clock() - began

    def kill(self, node: Node) -> None:
        self.hurry()
        node.stop()

    def pause(self, node: Node) -> None:
        self.hurry()
        os.kill(node.pid, signal.SIGSTOP)

    def hurry(self) -> None:
        """Let all nodes notice soon that a node has died."""
        for node in self.nodes:
            with node.client() as client:
                client.config_set("cluster-node-timeout", round(1000 * NODE_TIMEOUT))

    def fail_over(self, key: str) -> Node:
        """Fail over as an operator does, with all servers alive. Return the new owner of *key*."""
        self.hurry()
        replica = self.replica_of(self.owner(key))
        asked_at = float("-inf")

        def is_over() -> bool:
            nonlocal asked_at
            # On a busy machine the votes may be late. The server then gives up, and is asked again.
            if clock() > asked_at + 6:
                asked_at = clock()
                with suppress(redis.ResponseError):
                    replica.ask("FAILOVER")
            return all(self._names(node, slot_of(key), replica) for node in self.nodes)

        until(is_over, "all know of it", timeout=30)
        return replica

    def begin_to_move(self, key: str, target: Node | None = None) -> tuple[Node, Node]:
        """Begin to move the slot of *key* to another master; its keys stay where they are."""
        source = self.owner(key)
        target = target or next(node for node in self.masters if node is not source)
        target.ask("SETSLOT", slot_of(key), "IMPORTING", source.id)
        source.ask("SETSLOT", slot_of(key), "MIGRATING", target.id)
        return source, target

    def move_keys(self, slot: int, source: Node, target: Node) -> None:
        with source.client() as client:
            while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)

    def end_to_move(self, key: str, source: Node, target: Node) -> None:
        self.move_keys(slot_of(key), source, target)
        for node in (target, source, *(one for one in self.masters if one not in (source, target))):
            node.ask("SETSLOT", slot_of(key), "NODE", target.id)

    def move(self, key: str, target: Node | None = None) -> tuple[Node, Node]:
        source, target = self.begin_to_move(key, target)
        self.end_to_move(key, source, target)
        return source, target

    def flush(self) -> None:
        for node in self.masters:
            node.flush()

    def _view(self) -> list[tuple[int, int, int]]:
        for node in self.nodes:
            with suppress(redis.RedisError, AssertionError):
                return _answering(node).slots()
        raise AssertionError("no server of the cluster answers")

    def _knows_all(self, node: Node) -> bool:
        return node.info["cluster_known_nodes"] == str(len(self.nodes)) and len(node.slots()) == _MASTERS

    def _is_ready(self, node: Node) -> bool:
        with node.client() as client:
            replication = client.info("replication")
        is_linked = replication["role"] == "master" or replication["master_link_status"] == "up"
        replicas = replication["connected_slaves"] if node in self.nodes[:_MASTERS] else self.replicas
        return is_linked and node.info["cluster_state"] == "ok" and replicas == self.replicas

    def _names(self, node: Node, slot: int, owner: Node) -> bool:
        return any(first <= slot <= last and port == owner.port for first, last, port in node.slots())


def _answering(node: Node) -> Node:
    """Return *node*; raise an error if it is paused or gone."""
    with redis.Redis(port=node.port, socket_timeout=0.5, socket_connect_timeout=0.5) as client:
        client.ping()
    return node


@contextmanager
def sharded(kind: str, *arguments: str) -> Iterator[Node]:
    """A single server with all slots, like a service whose shards are behind one address."""
    with started(Node(kind, *arguments)) as node:
        node.ask("ADDSLOTSRANGE", 0, SLOTS - 1)
        until(lambda: node.info["cluster_state"] == "ok", "it serves", timeout=60)
        yield node


def clustered(kind: str, *arguments: str, **options: Any) -> AbstractContextManager[Cluster]:
    return started(Cluster(kind, *arguments, **options))
