"""Where endings are played: a server, a broker that can be cut off, workers of one pool."""

import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from tests.endings.app import SHORT, TASKS, app
from tests.endings.cases import BOUNDS, ENDINGS, Ending
from tests.monitor import Monitor
from tests.proxy import Proxy
from tests.recorder import Event, Recorder, overlaps
from tests.servers import Server
from tests.waiting import until
from tests.workers import Worker, is_alive

WORKERS_AT_ONCE = 3
# Seconds in which a heartbeat that goes on renews a short lease five times.
RENEWED_OFTEN = 2 * SHORT
# A heartbeat may be waiting for an answer as another thread releases the lease, and ask once more.
UNDER_WAY = 2


@dataclass(frozen=True)
class Outcome:
    freed_after: float
    overlaps: list[tuple[Event, Event]]
    tokens: list[str]
    next_ran: bool
    without_expiry: list[str]
    monitor: Monitor

    @property
    def renewed_after_release(self) -> list[str]:
        return [token for token in self.tokens if self.monitor.renewals_after_release(token) > UNDER_WAY]


class Stage:
    def __init__(self, column: str, server: Server) -> None:
        self._server = server
        self.pool, _, acks = column.partition(", ")
        self.late = acks == "acks_late"
        self.endings = [ending for ending in ENDINGS if ending.cell(column) in BOUNDS]
        self._stack = ExitStack()
        self.workers: list[Worker] = []
        self._brokers: dict[Worker, Proxy] = {}

    def __enter__(self) -> Self:
        self._monitor = self._stack.enter_context(Monitor(self._server))
        base = self._server.url.removesuffix("/0")
        self._recorder = Recorder(f"{base}/3")
        self._locks = self._server.client(database=2)
        app.conf.update(broker_url=self._server.url, result_backend=f"{base}/1", singleton_lock_url=f"{base}/2")
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()
        self._stack.close()

    def play_all(self) -> dict[str, Outcome]:
        self._start("next")
        together = [ending for ending in self.endings if not ending.alone]
        alone = [ending for ending in self.endings if ending.alone]
        self._start("together", concurrency=len(together))
        # A pool of greenlets may be ready before it hears a revocation.
        until(lambda: len(app.control.ping(timeout=0.5)) == len(self.workers), "the workers listen", timeout=60)
        at_once = 1 if self.pool == "solo" else len(together)
        with ThreadPoolExecutor(at_once) as players:
            found = dict(players.map(lambda ending: (ending.name, self._play(ending, "together")), together))
        with ThreadPoolExecutor(WORKERS_AT_ONCE) as players:
            found |= dict(players.map(lambda ending: (ending.name, self._play_alone(ending)), alone))
        time.sleep(RENEWED_OFTEN)
        return found

    def worker_of(self, run: Event) -> Worker:
        return next(worker for worker in self.workers if worker.pid == os.getpgid(run.pid))

    def broker_of(self, worker: Worker) -> Proxy:
        """Its way to the broker. Each has its own: kombu loses what a worker takes as its connection is cut."""
        return self._brokers[worker]

    def _play_alone(self, ending: Ending) -> Outcome:
        queue = re.sub(r"\W+", "-", ending.name)
        self._start(queue, *ending.arguments, env=ending.env)
        return self._play(ending, queue)

    def _play(self, ending: Ending, queue: str) -> Outcome:
        key, task = f"{ending.name} {os.urandom(4).hex()}", TASKS[ending.ttl, self.late]
        result = task.apply_async((key, ending.how), queue=queue, **ending.options)
        run = until(lambda: self._events(key, "enter"), f"{key} has begun", timeout=60)[0]
        ending.act(self, run, result)
        ended = until(lambda: self._end_of(run), f"{key} has ended", timeout=60)
        until(lambda: self._is_free(task, key, run.facts["token"]), f"{key} is free", timeout=90)
        freed_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        following = task.apply_async((key, "return"), queue="next").get(timeout=60)
        return Outcome(
            freed_after=freed_at - ended.at,
            overlaps=overlaps(sorted([*self._events(key), ended], key=lambda event: event.at)),
            tokens=[event.facts["token"] for event in self._events(key, "enter")],
            next_ran=following == "ran",
            without_expiry=[name for name in self._locks.scan_iter("singleton:*") if self._locks.ttl(name) == -1],
            monitor=self._monitor,
        )

    def _start(self, queue: str, *arguments: str, concurrency: int = 2, env: Mapping[str, str] | None = None) -> None:
        base = self._server.url.removesuffix("/0")
        broker = self._stack.enter_context(Proxy(self._server.port))
        worker = Worker(
            "tests.endings.app",
            {"TEST_STORE": self._server.url, "TEST_BROKER": broker.url, "TEST_LOCKS": f"{base}/2", **(env or {})},
            *("--queues", queue, *arguments),
            pool=self.pool,
            concurrency=concurrency,
        )
        self.workers.append(worker.start())
        self._brokers[worker] = broker
        worker.ready()

    def _events(self, key: str, name: str | None = None) -> list[Event]:
        return [event for event in self._recorder.events(name) if event.key == key]

    def _end_of(self, run: Event) -> Event | None:
        left = [event for event in self._events(run.key, "leave") if (event.run, event.pid) == (run.run, run.pid)]
        if left:
            return left[0]
        if is_alive(run.pid):
            return None
        return Event("died", run.key, run.run, time.clock_gettime(time.CLOCK_BOOTTIME), run.pid, {})

    def _is_free(self, task: Any, key: str, token: str) -> bool:
        return token not in [holder.token for holder in task.lock_holders(key, "")]
