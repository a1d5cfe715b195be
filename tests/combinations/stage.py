"""Where programs are played: servers that serve all stages, and the workers of one."""

import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGTERM
from typing import Any, Self

from celery import Celery

from tests.combinations.program import Program, tasks_of
from tests.rabbit import Rabbit
from tests.runs.record import Record
from tests.runs.watch import Watch
from tests.servers import Server
from tests.workers import Worker

# Slots of each worker. The solo pool has one worker, so that there is one slot.
_SLOTS = {"prefork": (5, 5), "threads": (8, 8), "gevent": (12, 12), "eventlet": (12, 12), "solo": (1,)}
_GOODBYE = 8.0
_TROUBLES = ("CRITICAL", "Unrecoverable", "Signal handler")
# A pool process that a time limit or a signal ends while it writes to its main process leaves half a message in
# the pipe. Celery's main process reads the rest as another message and dies of it, by an error that no whole message
# causes.
_HALF_A_MESSAGE = re.compile(r"Unrecoverable error: (UnpicklingError|UnicodeDecodeError|EOFError)\(")
# A signal that raises in a pool process while it publishes makes kombu close its connection. If half an answer had been
# read, amqp waits for ever for the rest. The frames are in the order of faulthandler: the innermost first.
_HUNG_IN_AMQP = re.compile(
    r"^Current thread .*\n(  File .*/(amqp|kombu)/.*\n)+  File .*/kombu/resource\.py\", line \d+ in replace$",
    re.MULTILINE,
)


class Servers:
    def __init__(self) -> None:
        self._stack = ExitStack()
        self._rabbit: Rabbit | None = None
        self._starting = threading.Lock()
        self.valkey = Server("valkey")
        self.directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="singleton-lock-combined-"))

    def __enter__(self) -> Self:
        self._stack.callback(self.valkey.close)
        self.valkey.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rabbit(self) -> str:
        with self._starting:
            if self._rabbit is None:
                self._rabbit = Rabbit()
                self._stack.callback(self._rabbit.close)
                self._rabbit.start()
            return self._rabbit.url

    def redis(self, database: int) -> str:
        return self.valkey.url.removesuffix("/0") + f"/{database}"


class Stage:
    def __init__(self, servers: Servers, programs: Sequence[Program], number: int) -> None:
        self.facts = programs[0].stage
        self.servers = servers
        self.directory = Path(servers.directory) / f"stage-{number}"
        self._number = number
        self._programs = programs
        self._stack = ExitStack()
        self._workers: list[Worker] = []
        self.logs: list[str] = []

    @property
    def queue(self) -> str:
        return f"combinations{self._number}"

    def key(self, number: int) -> str:
        """The key of a program; no other stage uses it, so leftovers harm nobody else."""
        return f"stage {self._number} program {number}"

    def __enter__(self) -> Self:
        self.directory.mkdir()
        path = self.directory / "setting.json"
        path.write_text(json.dumps(self._setting()), encoding="utf-8")
        self.path = str(self.directory / "record.jsonl")
        self.env = {"COMBINATIONS_SETTING": str(path), "TEST_RECORD": self.path}
        # Pickle is among the serialisers, and root may run the tests.
        self.env |= {"C_FORCE_ROOT": "1"}
        try:
            from celery.backends.database.session import SessionManager

            from tests.combinations.app import make_app

            self.app: Celery = make_app(self._setting())
            self._stack.callback(self.app.close)
            if self.facts["results"] == "database":
                # Before 5.5 Celery makes its tables at the first query, and concurrent queries fail.
                # With a manager of its own, for the one that all backends share makes the tables of one database only.
                self.app.backend.ResultSession(SessionManager()).close()
            self._start()
            self.locks = self._stack.enter_context(self.servers.valkey.client(2))
            self.watch = self._stack.enter_context(Watch(self.path, Record(self.path)))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def troubles(self) -> list[str]:
        found = []
        for worker in self._workers:
            log = worker.log()
            with suppress(subprocess.TimeoutExpired):
                worker.wait(0)
                found.append("a worker has ended by itself: " + log[-2000:])
            found += [line for line in log.splitlines() if any(word in line for word in _TROUBLES)]
        return found

    def why_void(self) -> str:
        """A fault of Celery's own that makes the findings of this stage worthless; empty if there is none."""
        logs = [worker.log() for worker in self._workers]
        if any(map(is_half_a_message, logs)):
            return "Celery's main process has died of half a message"
        return "a body hangs in amqp, which a signal has struck" if any(map(hangs_in_amqp, logs)) else ""

    def _start(self) -> None:
        pool = self.facts["pool"]
        for slots in _SLOTS[pool]:
            worker = Worker("tests.combinations.app", self.env, pool=pool, concurrency=slots)
            self._stack.callback(worker.close)
            self._workers.append(worker.start())
        for worker in self._workers:
            worker.ready()
        self._stack.callback(self._say_goodbye)

    def _say_goodbye(self) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.send(SIGTERM)
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(_GOODBYE)
        self.logs = [worker.log() for worker in self._workers]

    def _setting(self) -> dict[str, Any]:
        return {
            "stage": self.facts,
            "broker": self._broker(),
            "results": self._results(),
            "locks": self.servers.redis(2),
            "queue": self.queue,
            "tasks": tasks_of(self._programs),
        }

    def _broker(self) -> str:
        return self.servers.redis(0) if self.facts["broker"] == "redis" else self.servers.rabbit()

    def _results(self) -> str | None:
        return {
            "redis": self.servers.redis(1),
            "forgotten": self.servers.redis(1),
            "rpc": "rpc://",
            "database": f"db+sqlite:///{self.directory}/results.db",
            "none": None,
        }[self.facts["results"]]


def is_half_a_message(log: str) -> bool:
    return _HALF_A_MESSAGE.search(log) is not None and "in _recv_message" in log


def hangs_in_amqp(log: str) -> bool:
    return _HUNG_IN_AMQP.search(log) is not None
