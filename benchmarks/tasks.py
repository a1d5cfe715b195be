"""What a lock costs a task, as a share or a multiple of what plain Celery does in the same cycle.

Every library has a worker of its own, with two pool processes: what one of them leaves running in a
process, such as a thread, is then charged to nobody else. All share the broker, the result backend and
the machine, and take turns in short rounds, so that whatever else happens there falls on all alike. Plain
Celery takes part twice. How far the two are apart is what can be told from noise.

Each call has an argument of its own, so no lock is ever contended.
"""

import argparse
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self, TypeVar

from redis import Redis
from rich.console import Console

from benchmarks import processor, report, server_side
from benchmarks.candidates import client_of
from benchmarks.libraries import PLAIN, PLAIN_AGAIN, Library, problems, usable, versions
from benchmarks.report import Row
from benchmarks.rounds import Spread, in_turns, ratio
from tests.servers import Server, running
from tests.waiting import until
from tests.workers import Worker

T = TypeVar("T")

APP = "benchmarks.noop_app"
# What nobody reads of the notifications that results have come must not end the connection.
UNREAD = ("--client-output-buffer-limit", "pubsub", "0", "0", "0")
PATIENCE = 60
A_MOMENT = 0.1
# One for each pool process.
FEWEST_TASKS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How often, and how long a round is."""

    blocks: int
    cycles: int
    seconds: float
    most_tasks: int
    starts: int


FULL = Plan(blocks=3, cycles=5, seconds=0.25, most_tasks=400, starts=5)
QUICK = Plan(blocks=1, cycles=3, seconds=0.05, most_tasks=10, starts=1)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per task, of one round."""

    published: float
    run: float
    processor: float
    published_and_run: float
    start: float


class Runner:
    """Publishes the calls of one library, and reads from their results when they ran."""

    numbers = itertools.count()

    def __init__(self, library: Library, worker: Worker, store: str, plan: Plan) -> None:
        # Configured by the environment, so not before that is set.
        noop_app = import_module(APP)
        self.label = library.label
        self._worker = worker
        self._app, self._queue = noop_app.app, noop_app.queue_of(library)
        self._task, self._held = noop_app.NOOPS[self.label], noop_app.HELD[self.label]
        self._broker, self._results, _, self._signals = (_database(store, number) for number in range(4))
        self._plan = plan
        self._tasks = 1

    def warm_up(self) -> Self:
        """Connect everything, and find out how many tasks make a round of the length that is wanted."""
        for _ in range(2):
            self._start_of_one()
        self._tasks = 8 if self._start_of_one() < self._plan.seconds else FEWEST_TASKS
        each = self._published_and_run()
        self._tasks = max(FEWEST_TASKS, min(self._plan.most_tasks, round(self._plan.seconds / each)))
        return self

    def round(self) -> Timing:
        """Each of the four once."""
        published, run, processor_time = self._published_then_run()
        starts = max(1, min(self._plan.starts, self._tasks // 4))
        return Timing(
            published,
            run,
            processor_time,
            self._published_and_run(),
            statistics.fmean(self._start_of_one() for _ in range(starts)),
        )

    def run_one(self) -> None:
        """Until the lock is given back, which may be after the result is there."""
        self._start_of_one()
        time.sleep(A_MOMENT)

    @contextmanager
    def one_is_held(self) -> Iterator[None]:
        """The body of a task runs."""
        self._held.apply_async((next(self.numbers),), queue=self._queue)
        assert self._signals.blpop(["begun"], PATIENCE), f"a task of {self.label} runs"
        try:
            yield
        finally:
            self._signals.rpush("end", 1)
            until(self._results.dbsize, f"the task of {self.label} has ended", timeout=PATIENCE)
            # The lock is given back later than the result is there, by some.
            time.sleep(A_MOMENT)
            self._results.flushdb()

    def _published_then_run(self) -> tuple[float, float, float]:
        """The messages come all at once: their list is renamed to the one that the worker looks at."""
        elsewhere = f"{self._queue}-elsewhere"
        begun = time.time()
        calls = self._publish(self._tasks, elsewhere)
        worked = processor.seconds(self._worker.pid)
        published = time.time()
        self._broker.rename(elsewhere, self._queue)
        ended = self._end_of(calls)
        worked_on = processor.seconds(self._worker.pid)
        return tuple(map(self._per_task, (begun, published, worked), (published, ended, worked_on)))

    def _published_and_run(self) -> float:
        begun = time.time()
        return self._per_task(begun, self._end_of(self._publish(self._tasks, self._queue)))

    def _start_of_one(self) -> float:
        begun = time.time()
        (call,) = calls = self._publish(1, self._queue)
        self._end_of(calls)
        # Read with the moment of its end, and kept.
        return float(call.result) - begun

    def _publish(self, tasks: int, queue: str) -> list[Any]:
        return [self._task.apply_async((next(self.numbers),), queue=queue) for _ in range(tasks)]

    def _end_of(self, calls: list[Any]) -> float:
        """When the last of them ended, by its own result, however seldom one looks."""
        until(lambda: self._results.dbsize() == len(calls), f"the tasks of {self.label} end", timeout=PATIENCE)
        ended = max(call.date_done.replace(tzinfo=UTC).timestamp() for call in calls)
        self._results.flushdb()
        return ended

    def _per_task(self, begun: float, ended: float) -> float:
        return (ended - begun) / self._tasks


def measure(plan: Plan) -> list[Row]:
    """What takes time, on several sets of workers, because one may be faster than its like all its life; and counts."""
    blocks = [in_a_process(timed, plan) for _ in range(plan.blocks)]
    found = {label: [timing for block in blocks for timing in block[label]] for label in blocks[0]}
    return [*timings(found), *in_a_process(counted, plan)]


def in_a_process(measurement: Callable[[Plan], T], plan: Plan) -> T:
    """Of its own, because an app, and some of the libraries, know one broker and one store for ever."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measurement, plan).result()


def timed(plan: Plan) -> dict[str, list[Timing]]:
    """Everything on one server."""
    with running("valkey", *UNREAD) as store, runners(store, f"{store.url[:-1]}2", plan) as found:
        return in_turns({label: runner.warm_up().round for label, runner in found.items()}, plan.cycles)


def counted(plan: Plan) -> list[Row]:
    """The locks have a server of their own, which sees nothing else."""
    with running("valkey") as store, running("valkey") as locks, runners(store, locks.url, plan, 1) as found:
        return list(counts(found, locks.url))


@contextmanager
def runners(store: Server, locks: str, plan: Plan, processes: int = 2) -> Iterator[dict[str, Runner]]:
    """All that can be measured, each with its worker."""
    os.environ.update(BENCH_STORE=store.url, BENCH_LOCKS=locks)
    queue_of = import_module(APP).queue_of
    started = {library: Worker(APP, {}, "--queues", queue_of(library), concurrency=processes) for library in usable()}
    try:
        for worker in started.values():
            worker.start()
        for worker in started.values():
            worker.ready()
        yield {library.label: Runner(library, worker, store.url, plan) for library, worker in started.items()}
    finally:
        for worker in started.values():
            worker.close()


def counts(found: dict[str, Runner], locks: str) -> Iterator[Row]:
    """What the server of the locks sees of one task."""
    locking = {label: runner for label, runner in found.items() if label not in (PLAIN, PLAIN_AGAIN)}

    def seen(count: Callable[[str, Callable[[], object]], int]) -> dict[str, Spread]:
        return {label: Spread.of([count(locks, runner.run_one)]) for label, runner in locking.items()}

    yield Row(report.TASK_TRIPS, "", seen(server_side.round_trips))
    yield Row(report.TASK_COMMANDS, "", seen(server_side.commands))
    yield Row(report.TASK_MEMORY, "bytes", {label: memory(runner, locks) for label, runner in locking.items()})


def memory(runner: Runner, locks: str) -> Spread:
    """Of everything that is kept for one task."""
    with runner.one_is_held():
        return Spread.of([server_side.memory_of_all(locks)])


def timings(found: dict[str, list[Timing]]) -> list[Row]:
    """Throughput as a share of plain Celery's, time to start as a multiple."""
    others = [label for label in found if label != PLAIN]

    def seconds(label: str, what: str) -> list[float]:
        return [getattr(timing, what) for timing in found[label]]

    def shares(what: str) -> dict[str, Spread]:
        return {label: ratio(seconds(PLAIN, what), seconds(label, what)) for label in others}

    def multiples(what: str) -> dict[str, Spread]:
        return {label: ratio(seconds(label, what), seconds(PLAIN, what)) for label in others}

    return [
        Row(report.PUBLISHED_AND_RUN, PLAIN, shares("published_and_run")),
        Row(report.RUN, PLAIN, shares("run")),
        Row(report.PROCESSOR, PLAIN, multiples("processor")),
        Row(report.PUBLISHED, PLAIN, shares("published")),
        Row(report.START, PLAIN, multiples("start")),
    ]


def _database(store: str, number: int) -> Redis:
    return client_of(f"{store[:-1]}{number}")


def main() -> None:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds, which only prove that everything works")
    parser.add_argument("--one-core", action="store_true", help="everything on one core (Linux)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/tasks.json"), help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    console = Console()
    rows = measure(QUICK if arguments.quick else FULL)
    columns = [library.label for library in usable() if library.label != PLAIN]
    console.print(report.table("tasks that do nothing, on two pool processes", rows, columns))
    for label, problem in problems().items():
        console.print(f"{label} is not measured: {problem}")
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions(),
        "problems": problems(),
        "rows": [report.plain(row) for row in rows],
    }
    report.save(found, arguments.out)
    console.print(f"saved as {arguments.out}")


if __name__ == "__main__":
    main()
