"""The cost of a lock for a task, beside plain Celery in the same cycle.

Every library has a worker of its own: what one of them leaves running in a process, such as a thread, is then charged
to nobody else. All share the broker, the result backend and the machine, and take turns in short rounds, so that
whatever else happens there falls on all alike. Plain Celery takes part twice. How far the two are apart is what can
be told from noise. Three are no libraries but the least that a client could send, which is the floor.

Everything is measured twice, on a worker with two pool processes, and with one, where the worker has a core for itself
and the server the other. The publisher is on the server's core then: it sleeps while the tasks run that it has
published before, so "run" tells of nothing but worker and server. On the worker's core it would be charged to the
tasks; free to move, to whatever it meets. Where a publisher is slower than the worker, "published and run" tells of it.
Both are told without `acks_late` and with it, which the same workers take in turn.

Each call has an argument of its own, so no lock is ever contended.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from benchmarks import floors, perf, report, server_side
from benchmarks.candidates import OURS
from benchmarks.libraries import FLOORS, HEIMDALL, PLAIN, PLAIN_AGAIN, late, problems, usable, versions
from benchmarks.report import Row, Rows
from benchmarks.rounds import Spread, in_turns
from benchmarks.runner import APP, Count, Plan, Runner, Timing, database, in_a_process
from benchmarks.task_costs import EARLY, Asked, instructions, of_one_kind, timings
from tests.servers import Server, running
from tests.workers import Worker

T = TypeVar("T")
Found = tuple[dict[str, list[Timing]], dict[str, list[Count]]]

# Redis must not close a connection on which nobody reads that results have come.
UNREAD = ("--client-output-buffer-limit", "pubsub", "0", "0", "0")

FULL = Plan(blocks=3, pinned_blocks=2, cycles=5, seconds=0.15, most_tasks=400, starts=5, counts=3)
QUICK = Plan(blocks=1, pinned_blocks=1, cycles=3, seconds=0.05, most_tasks=10, starts=1, counts=1)

# Waits for a quarter of a second at each task, which is told once; measuring it takes longer than all others.
SLOW = {HEIMDALL}

# They have no body that could be held.
FLOOR_LABELS = {library.label for library in FLOORS}

TWO = "tasks that do nothing, on two pool processes"
PINNED = "on one pool process, which shares a core with its worker; the server has the other"
COUNTED = "what one task adds"


def measure(plan: Plan) -> dict[str, list[Rows]]:
    """Times, on several sets of workers, because one may be faster than its like all its life; and counts."""
    timed = [*tables(TWO, [in_a_process(on_two_processes, plan, block) for block in range(plan.blocks)])]
    if len(_cores()) > 1:
        blocks = [in_a_process(on_two_cores, plan, block) for block in range(plan.pinned_blocks)]
        timed += tables(PINNED, blocks, report.pinned)
    return {"timed": timed, "counted": in_a_process(counted, plan)}


def on_two_processes(plan: Plan, block: int) -> Found:
    """Wherever the machine lets them run."""
    with running("valkey", *UNREAD) as store, runners(store, f"{store.url[:-1]}2", plan) as found:
        return rounds(found, plan, counts=block == 0)


def on_two_cores(plan: Plan, block: int) -> Found:
    """Place this process on one core at a time, because its children start there; it ends on the server's core."""
    servers, workers = ({core} for core in _cores()[:2])
    os.sched_setaffinity(0, servers)
    with running("valkey", *UNREAD) as store:
        os.sched_setaffinity(0, workers)
        with runners(store, f"{store.url[:-1]}2", plan, processes=1, without=SLOW) as found:
            os.sched_setaffinity(0, servers)
            return rounds(found, plan, counts=block == 0)


def rounds(found: dict[str, Runner], plan: Plan, counts: bool) -> Found:
    """In turns; instructions apart, where they can be counted."""
    timed = in_turns({label: runner.warm_up().round for label, runner in found.items()}, plan.cycles)
    if not counts or perf.problem():
        return timed, {}
    return timed, in_turns({label: runner.count for label, runner in found.items()}, plan.counts)


def tables(title: str, blocks: Sequence[Found], asked: Asked = str) -> Iterator[Rows]:
    """One without `acks_late`, and one with it."""
    timed, counts = ({label: _joined(found, label) for label in found[0]} for found in zip(*blocks, strict=True))
    for acks_late in (False, True):
        rows = timings(of_one_kind(timed, acks_late), asked)
        yield Rows(late(title) if acks_late else title, rows + instructions(of_one_kind(counts, acks_late)))


def counted(plan: Plan) -> list[Rows]:
    """The locks have a server of their own, which sees nothing else."""
    with running("valkey") as store, running("valkey") as locks, runners(store, locks.url, plan, processes=1) as found:
        kinds = {COUNTED: of_one_kind(found, False), late(COUNTED): of_one_kind(found, True)}
        return [Rows(title, list(counts(kind, locks.url))) for title, kind in kinds.items()]


@contextmanager
def runners(
    store: Server, locks: str, plan: Plan, processes: int = 2, without: Collection[str] = ()
) -> Iterator[dict[str, Runner]]:
    """All that can be measured, with and without `acks_late`, each library with its worker."""
    os.environ.update(BENCH_STORE=store.url, BENCH_LOCKS=locks)
    queue_of = import_module(APP).queue_of
    libraries = [library for library in usable() if library.label not in without]
    started = {library: Worker(APP, {}, "--queues", queue_of(library), concurrency=processes) for library in libraries}
    try:
        for worker in started.values():
            worker.start()
        for worker in started.values():
            worker.ready()
        every = [
            Runner(library, acks_late, worker, store, plan)
            for library, worker in started.items()
            for acks_late in ((False,) if library.label in SLOW else (False, True))
        ]
        found = {runner.label: runner for runner in every}
        # For the floors, which play it again.
        database(store, 3).set(floors.RECORDED, json.dumps(found[OURS].scripts(locks)))
        yield found
    finally:
        for worker in started.values():
            worker.close()


def counts(found: Mapping[str, Runner], locks: str) -> Iterator[Row]:
    """Round trips, commands and bytes of one task at the server of the locks."""
    locking = {label: runner for label, runner in found.items() if label not in (PLAIN, PLAIN_AGAIN, EARLY)}

    def seen(count: Callable[[str, Callable[[], object]], int]) -> dict[str, Spread]:
        return {label: Spread.of([count(locks, runner.run_one)]) for label, runner in locking.items()}

    yield Row(report.TASK_TRIPS, "", seen(server_side.round_trips))
    yield Row(report.TASK_COMMANDS, "", seen(server_side.commands))
    if EARLY in found:
        # The bytes of a lock are the same.
        return
    kept = {label: memory(runner, locks) for label, runner in locking.items() if label not in FLOOR_LABELS}
    yield Row(report.TASK_MEMORY, "bytes", kept)


def memory(runner: Runner, locks: str) -> Spread:
    """The bytes of everything that is kept for one task."""
    with runner.one_is_held():
        return Spread.of([server_side.memory_of_all(locks)])


def _joined(blocks: Sequence[Mapping[str, list[T]]], label: str) -> list[T]:
    return [each for block in blocks for each in block.get(label, [])]


def _cores() -> list[int]:
    """None where they cannot be chosen (not Linux)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def main() -> None:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds, which only prove that everything works")
    parser.add_argument("--one-core", action="store_true", help="everything on one core (Linux)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/tasks.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = measure(QUICK if arguments.quick else FULL)
    every = [*found["timed"], *found["counted"]]
    missing = [f"{label} is not measured: {problem}." for label, problem in problems().items()]
    if why := perf.problem():
        missing.append(f"Instructions are not counted: {why}.")
    report.save(
        {
            "date": datetime.now(UTC).date().isoformat(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "versions": versions(),
            "problems": problems(),
            "instructions": why,
            # What README shows.
            "rows": [report.plain(row) for part in found.values() for row in part[0].rows],
            "tables": [{"title": each.title, "rows": [report.plain(row) for row in each.rows]} for each in every],
        },
        arguments.out,
    )
    report.save_markdown(every, missing, arguments.out.with_suffix(".md"))
    report.show(every, [*missing, f"saved as {arguments.out}, and for reading beside it"])


if __name__ == "__main__":
    main()
