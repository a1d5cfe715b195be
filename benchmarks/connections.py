"""How many connections each process of a deployment has, with plain tasks and with tasks of this library."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from benchmarks.many import APP, children, descriptors
from tests.servers import running
from tests.waiting import until
from tests.workers import Process

SERVERS = ("broker", "backend", "store")
KINDS = ("plain", "singleton", "reschedule")
SCHEDULERS = {"plain": "celery.beat:PersistentScheduler"}
OURS = "celery_singleton_lock.beat:SingletonScheduler"
WORKERS, POOL, WEB = 2, 4, 4
CALLS = 40
# Seconds of a body that is long enough for a renewal.
LONG = 4.0
A_LOOK = 0.1
# Seconds in which a lease is renewed, a beat sends its entry, and the counts are flushed.
WORKS_FOR = 15.0
PATIENCE = 60

Figures = dict[str, dict[str, int]]


def of_a_deployment(kind: str) -> Figures:
    """The most that a process of each kind has to each server, and the most that all processes have at a time."""
    most = dict[str, Counter[str]]()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(running("valkey")) for name in SERVERS}
        os.environ.update({f"SCALE_{name.upper()}": server.url for name, server in servers.items()}, SCALE_KIND=kind)
        ports = {server.port: name for name, server in servers.items()}
        control = import_module(APP).app.control
        workers = [stack.enter_context(_celery("worker", "-c", str(POOL), "-n", f"w{n}@%h")) for n in range(WORKERS)]
        until(lambda: len(control.ping() or ()) == WORKERS, "the workers answer", timeout=PATIENCE)
        schedule = f"{servers['broker'].directory}/beat"
        beat = stack.enter_context(_celery("beat", "--schedule", schedule, "-S", SCHEDULERS.get(kind, OURS)))
        webs = [stack.enter_context(_web(kind)) for _ in range(WEB)]
        end = time.monotonic() + WORKS_FOR
        while time.monotonic() < end:
            in_all = Counter[str]()
            for name, links in _looked_at(workers, beat, webs):
                has = Counter(ports[port] for port in links.values() if port in ports)
                most[name] = most.get(name, Counter()) | has
                in_all += has
            most["in all"] = most.get("in all", Counter()) | in_all
            time.sleep(A_LOOK)
    return {name: dict(each) for name, each in most.items()}


def _looked_at(workers: list[int], beat: int, webs: list[int]) -> Iterator[tuple[str, dict[str, int]]]:
    """Each process, and its connections."""
    yield from (("web process", _links(pid)) for pid in webs)
    yield "beat", _links(beat)
    for pid in workers:
        main = _links(pid)
        yield "main process of a worker", main
        for child in children(pid):
            # A child inherits the main process's connections.
            yield "pool process", {socket: port for socket, port in _links(child).items() if socket not in main}


def _links(pid: int) -> dict[str, int]:
    """The sockets of a process that are connected, each with the port at the other end."""
    mine = {os.readlink(each) for each in descriptors(pid)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": int(row[2].rpartition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in mine}


@contextmanager
def _celery(*command: str) -> Iterator[int]:
    process = Process(APP, {}, *command)
    try:
        yield process.pid
    finally:
        process.close()


@contextmanager
def _web(kind: str) -> Iterator[int]:
    command = [sys.executable, "-m", "benchmarks.connections", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # noqa: S603 (it is this file)
        # It ends once nobody can write to it.
        yield process.pid


def main() -> None:
    """A web process: it publishes, waits for results, and stays."""
    kinds = import_module(APP).kinds[sys.argv[1]]
    # The first is long enough for a renewal.
    called = [kinds[0].delay(os.getpid(), LONG)]
    called += [kinds[number % len(kinds)].delay(number) for number in range(CALLS)]
    for each in called:
        # A skipped call is an answer, too.
        each.get(timeout=PATIENCE, propagate=False)
    sys.stdin.read()


if __name__ == "__main__":
    main()
