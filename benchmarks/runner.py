"""Publishes the calls of one library to a worker of its own, and takes the time of them."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from importlib import import_module
from multiprocessing import get_context
from typing import Any, Self, TypeVar

from redis import Redis

from benchmarks import perf, processor, server_side
from benchmarks.candidates import client_of
from benchmarks.libraries import Library, late
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker

T = TypeVar("T")

APP = "benchmarks.noop_app"
PATIENCE = 60
A_MOMENT = 0.1
# In which the last task of a round gives its lock back, and its message is acknowledged.
UNTIL_QUIET = 0.01
# One for each pool process.
FEWEST_TASKS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How often, and how long a round is.

    Arguments:
        blocks: Sets of workers, one after the other, with two pool processes each.
        pinned_blocks: The same with one pool process, on cores of their own.
        cycles: Rounds of each library in a block.
        seconds: How long a round should be.
        most_tasks: And how many tasks it has at most.
        starts: How many calls in it are published and waited for one by one.
        counts: Rounds in which instructions are counted, in the first block of each kind.
    """

    blocks: int
    pinned_blocks: int
    cycles: int
    seconds: float
    most_tasks: int
    starts: int
    counts: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per task, of one round; *publisher*, *main*, *pool* and *server* are of the processor."""

    published: float
    run: float
    publisher: float
    main: float
    pool: float
    server: float
    published_and_run: float
    start: float

    @property
    def processor(self) -> float:
        """Processor time of all processes."""
        return self.publisher + self.main + self.pool + self.server


@dataclass(frozen=True, slots=True)
class Count:
    """Instructions per task, of one round."""

    main: float
    children: float
    server: float

    @property
    def worker(self) -> float:
        """The sum for the whole worker."""
        return self.main + self.children


class Runner:
    """The calls of one library, with or without `acks_late`."""

    numbers = itertools.count()

    def __init__(self, library: Library, acks_late: bool, worker: Worker, store: Server, plan: Plan) -> None:
        # Configured by the environment, so not before that is set.
        noop_app = import_module(APP)
        self.label = late(library.label) if acks_late else library.label
        self._worker, self._server = worker, store.pid
        self._app, self._queue = noop_app.app, noop_app.queue_of(library)
        self._task = (noop_app.NOOPS_LATE if acks_late else noop_app.NOOPS)[self.label]
        self._held = noop_app.HELD[library.label]
        self._broker, self._results, _, self._signals = (database(store, number) for number in range(4))
        self._plan = plan
        self._tasks = 1

    def warm_up(self) -> Self:
        """Connect everything, and find out how many tasks make a round of the length that is wanted."""
        for _ in range(2):
            self._start_of_one()
        self._tasks = 8 if self._start_of_one() < self._plan.seconds else FEWEST_TASKS
        for _ in range(2):
            # The first few of a worker are slower than the rest.
            each = self._published_and_run()
            self._tasks = max(FEWEST_TASKS, min(self._plan.most_tasks, round(self._plan.seconds / each)))
        return self

    def round(self) -> Timing:
        """Everything once."""
        used = self._processor_time()
        begun, publisher = time.time(), time.process_time()
        calls = self._publish_elsewhere()
        published, publisher = time.time(), time.process_time() - publisher
        self._let_them_run()
        used = [now - before for now, before in zip(self._processor_time(), used, strict=True)]
        ended = self._end_of(calls)
        starts = max(1, min(self._plan.starts, self._tasks // 4))
        return Timing(
            *map(self._per_task, (published - begun, ended - published, publisher, *used)),
            self._published_and_run(),
            statistics.fmean(self._start_of_one() for _ in range(starts)),
        )

    def count(self) -> Count:
        """Instructions, in a round of its own, because counting takes time."""
        groups = [self._worker.pid], processor.children_of(self._worker.pid), [self._server]
        calls = self._publish_elsewhere()
        with perf.counters(*groups) as counters:
            self._let_them_run()
            count = Count(*(self._per_task(counter.end()) for counter in counters))
        self._end_of(calls)
        return count

    def run_one(self) -> None:
        """Until the lock is given back, which may be after the result is there."""
        self._start_of_one()
        time.sleep(A_MOMENT)

    def scripts(self, locks: str) -> list[list[str]]:
        """The commands of a worker for one task, in full: a call before the body, and one after it."""
        self.run_one()
        found = [command for command in server_side.sent(locks, self.run_one) if command[0] == "EVALSHA"]
        assert len(found) == 2, found
        return found

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

    def _processor_time(self) -> list[float]:
        pid = self._worker.pid
        children = sum(map(processor.seconds, processor.children_of(pid)))
        return [processor.seconds(pid), children, processor.seconds(self._server)]

    def _publish_elsewhere(self) -> list[Any]:
        return self._publish(self._tasks, self._elsewhere)

    def _let_them_run(self) -> None:
        """The messages come all at once: their list is renamed to the one that the worker looks at."""
        self._broker.rename(self._elsewhere, self._queue)
        self._wait_for(self._tasks)
        time.sleep(UNTIL_QUIET)

    def _published_and_run(self) -> float:
        begun = time.time()
        return self._per_task(self._end_of(self._publish(self._tasks, self._queue)) - begun)

    def _start_of_one(self) -> float:
        begun = time.time()
        (call,) = calls = self._publish(1, self._queue)
        self._end_of(calls)
        # Read with the moment of its end, and kept.
        return float(call.result) - begun

    def _publish(self, tasks: int, queue: str) -> list[Any]:
        return [self._task.apply_async((next(self.numbers),), queue=queue) for _ in range(tasks)]

    def _wait_for(self, results: int) -> None:
        until(lambda: self._results.dbsize() == results, f"the tasks of {self.label} end", timeout=PATIENCE)

    def _end_of(self, calls: list[Any]) -> float:
        """When the last of them ended, by its own result, however seldom one looks."""
        self._wait_for(len(calls))
        ended = max(call.date_done.replace(tzinfo=UTC).timestamp() for call in calls)
        self._results.flushdb()
        return ended

    def _per_task(self, total: float) -> float:
        return total / self._tasks

    @property
    def _elsewhere(self) -> str:
        return f"{self._queue}-elsewhere"


def database(store: Server, number: int) -> Redis:
    """A client of one database of that server."""
    return client_of(f"{store.url[:-1]}{number}")


def in_a_process(measurement: Callable[..., T], *arguments: Any) -> T:
    """Measure in a new process, because an app, and some libraries, know one broker and one store for ever."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measurement, *arguments).result()
