"""The nemesis: one fault after another, dealt from a seed, each told and healed."""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.fire.kinds import KINDS, STRIKE
from tests.fire.load import Load
from tests.fire.stage import LONGEST_COLD_SHUTDOWN, LONGEST_WARM_SHUTDOWN, Host, Stage
from tests.fire.topologies import Strike
from tests.proxy import Proxy
from tests.runs.record import now
from tests.runs.watch import Open, Watch, group_of, send
from tests.waiting import until

LONGEST_TTL = max(kind.ttl for kind in KINDS.values())
# Well within a lease, and well beyond one.
SHORT_STOP, LONG_STOP = (0.1, 0.6), (LONGEST_TTL + 0.5, LONGEST_TTL + 2.0)
PAUSE = (0.3, 1.5)
_LONGEST_GOODBYE = {"warm": LONGEST_WARM_SHUTDOWN, "soft": LONGEST_COLD_SHUTDOWN, "cold": LONGEST_COLD_SHUTDOWN}


class Nemesis:
    """Deals faults until its time is over. Each is dealt once before any is dealt again."""

    def __init__(self, stage: Stage, watch: Watch, load: Load, seed: int) -> None:
        self._stage, self._watch, self._load = stage, watch, load
        self._rng = random.Random(f"nemesis {seed}")
        self._began = now()

    def rage(self, seconds: float) -> None:
        end = now() + seconds
        deck: list[Callable[[Nemesis], None]] = []
        while True:
            time.sleep(min(self._rng.uniform(*PAUSE), max(0.0, end - now())))
            self._stage.supervise()
            if now() >= end:
                return
            if not deck:
                deck = self._faults()
                self._rng.shuffle(deck)
            deck.pop()(self)

    def _faults(self) -> list[Callable[["Nemesis"], None]]:
        topology = self._stage.topology
        if topology is None:
            return list(FAULTS)
        others = [fault for fault in FAULTS if fault not in OF_ONE_SERVER]
        return [*others, *(partial(_strike, strike=strike) for strike in topology.faults() for _ in range(2))]

    # Processes.

    def kill_a_child(self) -> None:
        if victim := self._victim():
            with self._fault(f"SIGKILL of child {victim.pid} of {self._host_of(victim.pid)}, in {victim.key}"):
                send(victim.pid, signal.SIGKILL)

    def kill_a_worker(self) -> None:
        host = self._host()
        with self._fault(f"SIGKILL of {host}"):
            # Its children are left to the kernel.
            send(host.worker.pid, signal.SIGKILL)
            time.sleep(self._rng.uniform(0.2, 1.5))
            host.clear()
            host.start()

    def strike_children(self) -> None:
        with self._fault("signals that raise in the children of all workers"):
            end = now() + self._rng.uniform(1.0, 3.0)
            while now() < end:
                if pids := self._watch.pids():
                    send(self._rng.choice(pids), STRIKE)
                time.sleep(self._rng.uniform(0.01, 0.1))

    def stop_a_child_shortly(self) -> None:
        if victim := self._victim():
            self._stop([victim], self._rng.uniform(*SHORT_STOP), f"child {victim.pid}")

    def stop_a_child_beyond_its_lease(self) -> None:
        if victim := self._victim(left=1.0):
            self._stop([victim], self._rng.uniform(*LONG_STOP), f"child {victim.pid}")

    def stop_a_worker_with_its_children(self) -> None:
        host = self._host()
        self._stop(self._bodies_of(host), self._rng.uniform(*LONG_STOP), f"all of {host}", group=host.worker.pid)

    def stop_the_main_process_of_a_worker(self) -> None:
        host, seconds = self._host(), self._rng.uniform(*LONG_STOP)
        with self._fault(f"SIGSTOP of the main process of {host} for {seconds:.1f} s"):
            send(host.worker.pid, signal.SIGSTOP)
            time.sleep(seconds)
            send(host.worker.pid, signal.SIGCONT)

    def shut_down_warmly(self) -> None:
        self._shut_down(self._host(), signal.SIGTERM, "warm")

    def shut_down_softly(self) -> None:
        self._shut_down(self._host(soft=True), signal.SIGQUIT, "soft")

    def shut_down_cold(self) -> None:
        self._shut_down(self._host(soft=False), signal.SIGQUIT, "cold")

    # The store of locks.

    def restart_the_store_with_its_data(self) -> None:
        seconds = self._rng.choice([self._rng.uniform(0.1, 1.0), self._rng.uniform(*LONG_STOP)])
        with self._fault(f"the store of locks is killed and restarted with its data after {seconds:.1f} s"):
            self._stage.locks.stop()
            time.sleep(seconds)
            self._stage.locks.start()

    def restart_the_store_without_its_data(self) -> None:
        seconds = self._rng.uniform(0.1, 1.0)
        with self._fault("the store of locks is killed and restarted without its data"):
            down = now()
            self._stage.locks.stop()
            self._stage.locks.forget()
            time.sleep(seconds)
            self._stage.locks.start()
            self._stage.record.write("emptied", down=down)

    def swallow(self, more: str = "") -> None:
        self._cut_off(Proxy.black_hole, "a black hole", more)

    def reset(self) -> None:
        self._cut_off(Proxy.reset, "resets")

    def slow_receivers(self) -> None:
        receivers = Path(f"{self._stage.path}.slow")
        receivers.touch()
        self.swallow(", and receivers of signals are slow")
        receivers.unlink()

    def swallow_for_all(self) -> None:
        seconds = self._rng.uniform(0.5, LONGEST_TTL)
        with self._fault(f"a black hole for {seconds:.1f} s between all workers and the store of locks"):
            for host in self._stage.hosts:
                host.locks.black_hole()
            time.sleep(seconds)
            for host in self._stage.hosts:
                host.locks.forward()

    def lose_replies(self) -> None:
        host, end = self._host(), now() + self._rng.uniform(1.0, 3.0)
        with self._fault(f"replies of the store of locks to {host} are lost"):
            while now() < end:
                host.locks.lose_reply(b"EVAL").wait(0.5)

    def delay_replies(self) -> None:
        host, seconds = self._host(), self._rng.choice([0.1, 0.7, 1.2])
        with self._fault(f"replies of the store of locks to {host} come {seconds:.1f} s late"):
            host.locks.delay(seconds)
            time.sleep(self._rng.uniform(1.0, 3.0))
            host.locks.forward()

    def hold_questions(self) -> None:
        host = self._host()
        with self._fault(f"questions of {host} to the store of locks come late"):
            host.locks.hold(b"EVALSHA")
            time.sleep(self._rng.uniform(0.5, 3.0))
            host.locks.let_go()

    def move_the_store(self) -> None:
        with self._fault("another server takes over the store of locks; the old one becomes its replica, and ends"):
            old = self._stage.move_the_locks()
            time.sleep(self._rng.uniform(0.5, LONGEST_TTL))
            old.close()

    def flush_scripts(self) -> None:
        with self._fault("SCRIPT FLUSH at each master of the locks"):
            for master in self._stage.masters():
                with master.client() as client:
                    client.script_flush()

    def kill_clients(self) -> None:
        with self._fault("CLIENT KILL of every connection to the masters of the locks"):
            for master in self._stage.masters():
                with master.client() as client:
                    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    # The broker.

    def restart_the_broker(self) -> None:
        with self._fault("the broker is killed and restarted"):
            self._stage.broker.stop()
            time.sleep(self._rng.uniform(0.1, 1.0))
            self._stage.broker.start()

    def cut_off_from_the_broker(self) -> None:
        host = self._host()
        with self._fault(f"the connections of {host} to the broker are reset"):
            host.broker.cut()

    @contextmanager
    def _fault(self, what: str) -> Iterator[None]:
        print(f"at {now() - self._began:.1f} s: {what}", flush=True)
        self._stage.record.write("fault", what=what)
        yield
        self._stage.record.write("healed", what=what)

    def _cut_off(self, how: Callable[[Proxy], None], what: str, more: str = "") -> None:
        host, seconds = self._host(), self._rng.uniform(*LONG_STOP)
        with self._fault(f"{what} for {seconds:.1f} s between {host} and the store of locks{more}"):
            how(host.locks)
            self._rivals_for(self._bodies_of(host), seconds)
            host.locks.forward()

    def _stop(self, victims: list[Open], seconds: float, whom: str, group: int | None = None) -> None:
        with self._fault(f"SIGSTOP of {whom} for {seconds:.1f} s"):
            since, whom_to = now(), -group if group is not None else victims[0].pid
            send(whom_to, signal.SIGSTOP)
            self._rivals_for(victims if seconds > LONGEST_TTL else [], seconds)
            pids = [pid for pid in self._watch.pids() if pid == whom_to or group_of(pid) == group]
            # Before they go on, so that no moment in which they run is taken for a part of the stop.
            self._stage.record.write("stopped", pids=pids, since=since)
            send(whom_to, signal.SIGCONT)

    def _rivals_for(self, victims: list[Open], seconds: float) -> None:
        """Somebody wants what the victims have, late enough to get it and before they can go on."""
        end = now() + seconds
        time.sleep(max(0.0, seconds - 1.0))
        for victim in victims:
            if victim.task in KINDS:
                self._load.rival(victim.task, victim.key.split(" ", 1)[1])
        time.sleep(max(0.0, end - now()))

    def _shut_down(self, host: Host, number: int, how: str) -> None:
        with self._fault(f"{how} shutdown of {host}"):
            send(host.worker.pid, number)
            try:
                host.worker.wait(_LONGEST_GOODBYE[how])
            except subprocess.TimeoutExpired:
                in_celery = not host.hangs_in_the_lock(self._watch.pids())
                self._stage.record.write("stuck", what=f"{how} shutdown of {host}", in_celery=in_celery)
            host.clear()
            host.start()

    def _host(self, *, soft: bool | None = None) -> Host:
        """One that is up; the pool of the others goes on."""
        hosts = [host for host in self._stage.hosts if soft in (None, host.soft)]
        host = self._rng.choice(hosts)
        until(host.is_ready, f"{host} is ready", timeout=60)
        return host

    def _host_of(self, pid: int) -> Host | str:
        group = group_of(pid)
        return next((host for host in self._stage.hosts if host.worker.pid == group), "a worker")

    def _victim(self, left: float = 0.2) -> Open | None:
        """A body with so many seconds left to work; if there is none, a call is sent to become one."""
        found = self._bodies(left)
        if not found:
            name = self._rng.choice(("reschedule", "reschedule_late", "until_executed", "rerun", "wait_late"))
            self._load.call(name, f"victim {self._rng.randrange(1000)}", 3.0)
            with suppress(AssertionError):
                until(lambda: self._bodies(left), "a victim runs", timeout=5)
            found = self._bodies(left)
        return self._rng.choice(found) if found else None

    def _bodies_of(self, host: Host) -> list[Open]:
        return [body for body in self._watch.bodies() if group_of(body.pid) == host.worker.pid]

    def _bodies(self, left: float) -> list[Open]:
        return [body for body in self._watch.bodies() if body.left > left]


OF_ONE_SERVER: tuple[Callable[[Nemesis], None], ...] = (
    Nemesis.restart_the_store_with_its_data,
    Nemesis.restart_the_store_without_its_data,
    Nemesis.swallow,
    Nemesis.slow_receivers,
    Nemesis.swallow_for_all,
    Nemesis.reset,
    Nemesis.lose_replies,
    Nemesis.delay_replies,
    Nemesis.hold_questions,
    Nemesis.move_the_store,
)

FAULTS: tuple[Callable[[Nemesis], None], ...] = (
    Nemesis.kill_a_child,
    Nemesis.kill_a_worker,
    Nemesis.strike_children,
    Nemesis.stop_a_child_shortly,
    Nemesis.stop_a_child_beyond_its_lease,
    Nemesis.stop_a_worker_with_its_children,
    Nemesis.stop_the_main_process_of_a_worker,
    Nemesis.shut_down_warmly,
    Nemesis.shut_down_softly,
    Nemesis.shut_down_cold,
    *OF_ONE_SERVER,
    Nemesis.flush_scripts,
    Nemesis.kill_clients,
    Nemesis.restart_the_broker,
    Nemesis.cut_off_from_the_broker,
)


def _strike(nemesis: Nemesis, strike: Strike) -> None:
    strike(nemesis._fault, nemesis._rng)
