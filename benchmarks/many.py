"""Very many leases in one process, and very many tasks through one worker."""

import os
import resource
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import processor
from benchmarks.candidates import client_of
from celery_singleton_lock import Lock
from tests.servers import running
from tests.waiting import until
from tests.workers import Worker

Figures = dict[str, float]

APP = "benchmarks.scale_app"
LEASES = "scale-of-leases"
PATIENCE = 300
A_LOOK = 0.5


def leases(number: int, ttl: float, seconds: float) -> Figures:
    """Hold so many leases in this process, for so long."""
    with running("valkey") as server:
        before, begun = _memory(os.getpid()), len(_threads(os.getpid()))
        locks = [Lock(f"lease-{each}", url=f"{server.url}?client_name={LEASES}", ttl=ttl) for each in range(number)]
        taken = [lease for lock in locks if (lease := lock.acquire(blocking=False)) is not None]
        beats = _timed(locks[0]._store)  # noqa: SLF001 (users have none)
        worked, least, end = processor.seconds(os.getpid()), ttl, time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(A_LOOK)
            least = min(least, *(lease.remaining() for lease in taken))
        worked = processor.seconds(os.getpid()) - worked
        return {
            "leases": number,
            "ttl": ttl,
            "seconds": seconds,
            "lost": number - sum(lease.held for lease in taken),
            "longest renewal": max(beats),
            "least remaining": least,
            "sockets": _connections(server.url, LEASES),
            "threads": len(_threads(os.getpid())) - begun,
            "bytes of a lease": (_memory(os.getpid()) - before) / number,
            "processor": worked / seconds,
        }


def _timed(store: Any) -> list[float]:
    """How long each renewal takes from now on."""
    renew, took = store.renew, []

    def timed(*arguments: Any) -> Any:
        begun = time.monotonic()
        try:
            return renew(*arguments)
        finally:
            took.append(time.monotonic() - begun)

    store.renew = timed
    return took


def tasks(few: int, many: int, processes: int) -> dict[str, Figures]:
    """Send so many tasks through one worker; what it has after a few, and after many."""
    with running("valkey") as broker, running("valkey") as store:
        os.environ.update(SCALE_BROKER=broker.url, SCALE_BACKEND=broker.url, SCALE_STORE=store.url)
        played = import_module(APP)
        worker = Worker(APP, {}, "--loglevel", "WARNING", concurrency=processes)
        try:
            worker.start()
            until(played.app.control.ping, "the worker answers", timeout=60)
            found = {}
            for name, kinds in {"plain": [played.plain], "singleton": list(played.tasks.values())}.items():
                _send(kinds, few, broker.url, store.url)
                after_few = _owned(worker.pid)
                _send(kinds, many - few, broker.url, store.url)
                after_many = _owned(worker.pid)
                found[name] = {f"{what} after {few}": each for what, each in after_few.items()}
                found[name] |= {f"{what} after {many}": each for what, each in after_many.items()}
        finally:
            worker.close()
    return found


def _send(kinds: Sequence[Any], number: int, broker: str, store: str) -> None:
    with kinds[0].app.producer_pool.acquire() as producer:
        for each in range(number):
            kinds[each % len(kinds)].apply_async((each,), producer=producer)
    messages, locks = client_of(broker), client_of(store)
    until(lambda: not (messages.llen("celery") or messages.hlen("unacked")), "all have come", timeout=PATIENCE)
    # The counts of all tasks stay.
    until(lambda: not any("{" in key for key in locks.scan_iter("*")), "all have ended")


def _connections(url: str, name: str) -> int:
    return sum(1 for one in client_of(url).client_list() if one["name"] == name)


def _owned(pid: int) -> Figures:
    """The memory, threads and descriptors of a process and its children."""
    counts: dict[str, Callable[[int], float]] = {
        "bytes": _memory,
        "threads": _number_of_threads,
        "descriptors": _number_of_descriptors,
    }
    family = [pid, *children(pid)]
    return {what: sum(map(count, family)) for what, count in counts.items()}


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    direct = [int(child) for thread in _threads(pid) for child in (thread / "children").read_text().split()]
    return direct + [each for child in direct for each in children(child)]


def _threads(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def _number_of_threads(pid: int) -> int:
    return len(_threads(pid))


def _number_of_descriptors(pid: int) -> int:
    return len(descriptors(pid))


def descriptors(pid: int) -> list[Path]:
    """The descriptors that a process has open."""
    return [each for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]


def _memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
