"""Follows the record: which bodies run now, and which processes have died."""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from tests.recorder import Event
from tests.runs.record import Reader, Record, now
from tests.workers import is_alive

_ROUND = 0.02


@dataclass(frozen=True)
class Open:
    pid: int
    task: str
    key: str
    entered: float
    seconds: float

    @property
    def left(self) -> float:
        return self.entered + self.seconds - now()


class Watch:
    """Reads the record of the workers in a thread, and adds which of their processes have died."""

    def __init__(self, path: str, record: Record) -> None:
        self._reader, self._record = Reader(path), record
        self._open: dict[str, Open] = {}
        self._alive: set[int] = set()
        self._round_began = now()
        self._over = threading.Event()
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="watch")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def bodies(self) -> list[Open]:
        return list(self._open.values())

    def pids(self) -> list[int]:
        """All pool children that have begun a task and live."""
        return list(self._alive)

    def _run(self) -> None:
        while not self._over.wait(_ROUND):
            # A process that this round finds alive cannot have died before the round began.
            began = now()
            for pid in self._alive.copy():
                self._look_at(pid)
            self._round_began = began
            for event in self._reader.unread():
                self.events.append(event)
                self._follow(event)

    def _follow(self, event: Event) -> None:
        if event.name == "began":
            if event.pid not in self._alive:
                self._alive = self._alive | {event.pid}
                self._look_at(event.pid)
        elif event.name == "enter" and event.pid in self._alive:
            # If the process has died, that is noted already.
            self._open[event.run] = Open(event.pid, event.facts["task"], event.key, event.at, event.facts["seconds"])
        elif event.name in ("leave", "ended"):
            self._open.pop(event.run, None)

    def _look_at(self, pid: int) -> None:
        if is_alive(pid):
            return
        self._alive = self._alive - {pid}
        self._record.write("died", victim=pid, alive_at=self._round_began)
        for run in [run for run, body in self._open.items() if body.pid == pid]:
            del self._open[run]


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def group_of(pid: int) -> int:
    """The process group, whose number is the pid of the worker; 0 if the process is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
