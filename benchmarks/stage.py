"""Where a scenario is played: a server, a broker that can go away, workers, and one library."""

import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

from benchmarks.libraries import Library
from tests.proxy import Proxy
from tests.recorder import Event, Recorder
from tests.servers import running
from tests.waiting import until
from tests.workers import Worker

APP = "benchmarks.scenario_app"
# Publishing and running on a busy machine, and the second for which some wait before they begin.
AT_ONCE = 3.0
BETWEEN_CALLS = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a scenario, in a word or two for the table, and in a sentence."""

    word: str
    detail: str


class Stage:
    """One library in the surroundings of one scenario. Each needs a process, because an app knows one broker for ever.

    Arguments:
        library: Which.
        expiry: How long its locks last, in seconds; None for its default.
        workers: How many.
        concurrency: Of each.
        settings: Of Celery.
    """

    def __init__(
        self, library: Library, *, expiry: int | None = None, workers: int = 1, concurrency: int = 2, **settings: Any
    ) -> None:
        self.library = library
        self._env = {
            "SCENARIO_LIBRARY": library.label,
            "SCENARIO_EXPIRY": json.dumps(expiry),
            "SCENARIO_SETTINGS": json.dumps(settings),
        }
        self._number, self._concurrency = workers, concurrency
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            server = self._stack.enter_context(running("valkey"))
            self.broker = self._stack.enter_context(Proxy(server.port))
            self._env["SCENARIO_STORE"] = server.url
            os.environ.update(self._env, SCENARIO_BROKER=self.broker.url)
            played = import_module(APP)
            self.app, self.job, self.collect = played.app, played.job, played.collect
            self._orders = played.orders
            self._recorder = Recorder(f"{server.url[:-1]}3")
            self._locks = server.client(database=2)
            self.workers = self._start_workers(server.url)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, key: str, *order: Any, **options: Any) -> Any:
        """Call the task once more, which shall do this; returns its result, or None where it was refused."""
        if order:
            self.order(key, *order)
        try:
            return self.job.apply_async((key,), **options)
        except self.library.refusals:
            return None

    def order(self, key: str, *order: Any) -> None:
        """Tell the next body of this key what to do."""
        self._orders.rpush(key, json.dumps(order))

    def begin(self, key: str, *order: Any, **options: Any) -> tuple[Any, Event]:
        """Call the task, and wait until its body runs."""
        result = self.call(key, *order, **options)
        return result, until(lambda: self.runs(key), f"{key} has begun")[0]

    def events(self, key: str) -> list[Event]:
        """The events of this key, in order."""
        return [event for event in self._recorder.events() if event.key == key]

    def runs(self, key: str) -> list[Event]:
        """The bodies that have begun."""
        return [event for event in self.events(key) if event.name == "enter"]

    def is_quiet(self, key: str) -> bool:
        """As many have left as have begun."""
        return 2 * len(self.runs(key)) == len(self.events(key))

    def still_runs(self, run: Event) -> bool:
        """Whether the run has not left its body."""
        left = [(event.run, event.pid) for event in self.events(run.key) if event.name == "leave"]
        return (run.run, run.pid) not in left

    def worker_of(self, run: Event) -> Worker:
        """The worker in one of whose children this body runs."""
        return next(worker for worker in self.workers if worker.pid == os.getpgid(run.pid))

    def runs_again(self, key: str, within: float) -> float | None:
        """Call it until it runs; how long that took in seconds, None if it did not."""
        before, begun = len(self.runs(key)), time.monotonic()
        while time.monotonic() - begun < within:
            self.call(key)
            if happens(lambda: len(self.runs(key)) > before, BETWEEN_CALLS):
                return time.monotonic() - begun
        return None

    def next_call(self, key: str, within: float = 8) -> Verdict:
        """When the same call runs again, by trying, and beyond that by what the store has."""
        after = self.runs_again(key, within)
        if after is not None:
            return Verdict("at once" if after < AT_ONCE else f"after {after:.0f} s", f"it ran {after:.1f} s later")
        return self._kept()

    def _kept(self) -> Verdict:
        """How long what is in the store will be there."""
        # Counts of ours are in nobody's way.
        left = [self._locks.ttl(key) for key in self._locks.scan_iter() if not key.endswith(":stats")]
        if not left:
            return Verdict("never", "no key is in the way, and yet it does not run")
        if min(left) < 0:
            return Verdict("never", "its key has no expiry")
        return Verdict(f"after {in_words(max(left))}", f"its key is kept for {max(left)} s more")

    def _start_workers(self, broker: str) -> list[Worker]:
        env = {**self._env, "SCENARIO_BROKER": broker}
        started = [Worker(APP, env, concurrency=self._concurrency) for _ in range(self._number)]
        for worker in started:
            self._stack.callback(worker.close)
            worker.start()
        return [worker.ready() for worker in started]


def happens(condition: Any, within: float) -> bool:
    """Whether it does in that time."""
    try:
        until(condition, "", timeout=within)
    except AssertionError:
        return False
    return True


def in_words(seconds: float) -> str:
    """Rounded as one would say it."""
    return f"{round(seconds / 3600)} h" if seconds > 3000 else f"{seconds:.0f} s"
