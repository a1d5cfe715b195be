"""The record of fire and combinations, in a file, because a killed process cannot lose what it has written there."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

from celery_singleton_lock import current_lease, signals
from tests.recorder import Event


def now() -> float:
    """The clock of the library's deadlines, the same for all processes of a machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Record:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, name: str, key: str = "", run: str = "", **facts: Any) -> None:
        line = {"name": name, "key": key, "run": run, "at": now(), "pid": os.getpid(), "facts": facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Reader:
    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 (it stays open)
        self._unfinished = b""

    def unread(self) -> list[Event]:
        *lines, self._unfinished = (self._unfinished + self._file.read()).split(b"\n")
        return [Event(**json.loads(line)) for line in lines]


@dataclass(frozen=True)
class Execution:
    run: str = ""
    key: str = ""
    task: str = ""
    task_id: str = ""


execution: ContextVar[Execution] = ContextVar("execution", default=Execution())  # noqa: B039 (it is frozen)
# Pids are reused within an hour, so begin at the time.
_runs = count(time.time_ns())


@cache
def record() -> Record:
    """The record of this process. A process that only publishes may have none."""
    return Record(os.environ.get("TEST_RECORD", os.devnull))


class Recorded:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = str(args[0]) if args else ""
        token = execution.set(Execution(f"{os.getpid()}-{next(_runs)}", key, self.name, self.request.id))
        try:
            with _noted("began", "ended", key, attempt=self.request.retries or 0):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            execution.reset(token)


@contextmanager
def body(key: str, seconds: float = 0.0, number: int = 0) -> Iterator[None]:
    lease = current_lease()
    with _noted("enter", "leave", key, seconds=seconds, number=number, fence=lease.fence if lease else 0):
        yield


@contextmanager
def _noted(begin: str, end: str, key: str, **facts: Any) -> Iterator[None]:
    own, outcome = execution.get(), "returned"
    known = {"task": own.task, "task_id": own.task_id}
    try:
        record().write(begin, key, own.run, **known, **facts)
        yield
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        record().write(end, key, own.run, **known, outcome=outcome)


def work(seconds: float) -> None:
    """Sleep in slices, so that a thread can be interrupted. Time in which the process is stopped does not count."""
    for _ in range(max(1, round(seconds / 0.05))):
        time.sleep(min(seconds, 0.05))


@signals.lock_conflict.connect
def _conflict(sender: Any, key: str, holder: Any, outcome: str, **_: Any) -> None:
    own = execution.get()
    task_id = own.task_id or sender.request.id
    record().write("conflict", own.key, own.run, task_id=task_id, outcome=outcome, holder=holder.task_id)
