"""Where the locks of fire are if not at one server: with Sentinel, or in a cluster, each with faults of its own."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.clusters import Cluster, slot_of
from tests.fire.kinds import KINDS
from tests.fire.load import HOT
from tests.sentinels import Deployment
from tests.servers import Server
from tests.waiting import until

KIND = "redis" if shutil.which("redis-server") else "valkey"
LONGEST_TTL = max(kind.ttl for kind in KINDS.values())
# On a busy machine they may have to vote more than once.
_PATIENCE = 60.0

Fault = Callable[[str], AbstractContextManager[None]]
Strike = Callable[[Fault, random.Random], None]


class Topology:
    """Several servers of locks; a subclass has `servers`, `wait_until_whole` and `fail_over`."""

    servers: Any

    @property
    def url(self) -> str:
        return str(self.servers.url)

    @property
    def replicas(self) -> int:
        return int(self.servers.replicas)

    def masters(self) -> list[Server]:
        return list(self.servers.masters)

    def start(self) -> None:
        self.servers.start()

    def close(self) -> None:
        self.servers.close()

    def faults(self) -> list[Strike]:
        return [self.kill_a_master, self.stop_a_master_shortly, self.stop_a_master_until_it_is_replaced, self.fail_over]

    def kill_a_master(self, fault: Fault, rng: random.Random) -> None:
        with fault("a master of the locks is killed, and comes back as a replica"):
            master = rng.choice(self.masters())
            master.stop()
            self.servers.wait_for_another(master)
            time.sleep(rng.uniform(0.0, LONGEST_TTL))
            master.start()
            self.wait_until_whole()

    def stop_a_master_shortly(self, fault: Fault, rng: random.Random) -> None:
        seconds = rng.uniform(0.1, 0.7)
        with fault(f"SIGSTOP of a master of the locks for {seconds:.1f} s"):
            master = rng.choice(self.masters())
            os.kill(master.pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(master.pid, signal.SIGCONT)
            # The others may have taken it for dead.
            self.wait_until_whole()

    def stop_a_master_until_it_is_replaced(self, fault: Fault, rng: random.Random) -> None:
        with fault("SIGSTOP of a master of the locks until another one is"):
            master = rng.choice(self.masters())
            os.kill(master.pid, signal.SIGSTOP)
            try:
                self.servers.wait_for_another(master)
                time.sleep(rng.uniform(0.0, LONGEST_TTL))
            finally:
                os.kill(master.pid, signal.SIGCONT)
            self.wait_until_whole()

    def _have_their_replicas(self) -> bool:
        return all(_followers(master) == self.replicas for master in self.masters())


class WithSentinel(Topology):
    def __init__(self) -> None:
        self.servers = self._deployment = Deployment(KIND)

    def wait_until_whole(self) -> None:
        until(self._have_their_replicas, "the master has its replicas", timeout=_PATIENCE)

    def fail_over(self, fault: Fault, rng: random.Random) -> None:
        with fault("SENTINEL FAILOVER"):
            self._deployment.fail_over()
            self.wait_until_whole()

    def faults(self) -> list[Strike]:
        return [*super().faults(), self.stop_sentinels]

    def stop_sentinels(self, fault: Fault, rng: random.Random) -> None:
        sentinels = rng.sample(self._deployment.sentinels, rng.choice((1, 3)))
        seconds = rng.uniform(0.5, 2 * LONGEST_TTL)
        with fault(f"SIGSTOP of {len(sentinels)} of the sentinels for {seconds:.1f} s"):
            for sentinel in sentinels:
                os.kill(sentinel.pid, signal.SIGSTOP)
            time.sleep(seconds)
            for sentinel in sentinels:
                os.kill(sentinel.pid, signal.SIGCONT)
            self.wait_until_whole()


class InCluster(Topology):
    def __init__(self) -> None:
        self.servers = self._cluster = Cluster(KIND)

    def start(self) -> None:
        super().start()
        self._cluster.hurry()

    def wait_until_whole(self) -> None:
        # A server that comes back has the settings of before.
        self._cluster.hurry()
        until(
            lambda: len(self.masters()) == 3 and self._have_their_replicas(),
            "each master has its replica",
            timeout=_PATIENCE,
        )
        until(self._agree, "all agree", timeout=_PATIENCE)

    def _agree(self) -> bool:
        masters = {master.port for master in self.masters()}
        known = [{port for *_, port in node.slots()} for node in self._cluster.nodes]
        return all(each == masters for each in known) and all(
            node.info["cluster_state"] == "ok" for node in self._cluster.nodes
        )

    def fail_over(self, fault: Fault, rng: random.Random) -> None:
        with fault("CLUSTER FAILOVER of the shard of a hot key"):
            self._cluster.fail_over(_hot_key(rng))
            self.wait_until_whole()

    def faults(self) -> list[Strike]:
        return [*super().faults(), self.move_a_slot]

    def move_a_slot(self, fault: Fault, rng: random.Random) -> None:
        key = _hot_key(rng)
        with fault("the slot of a hot key moves to another master"):
            source, target = self._cluster.begin_to_move(key)
            time.sleep(rng.uniform(0.0, 2.0))
            self._cluster.move_keys(slot_of(key), source, target)
            time.sleep(rng.uniform(0.0, 2.0))
            self._cluster.end_to_move(key, source, target)


def _hot_key(rng: random.Random) -> str:
    from tests.fire import app

    return str(app.TASKS[rng.choice(list(KINDS))].lock_key_for(f"hot {rng.randrange(HOT)}", 0.0))


def _followers(master: Server) -> int:
    with master.client() as client:
        told = client.info("replication")
    states = [str(told[f"slave{number}"]["state"]) for number in range(told.get("connected_slaves", 0))]
    return states.count("online")


TOPOLOGIES: dict[str, type[Topology]] = {"sentinel": WithSentinel, "cluster": InCluster}
