"""Follows the record: which bodies run now, and which processes have died."""

import os
import select
import threading
from dataclasses import dataclass
from typing import Self

from tests.fire.record import Reader, Record, now
from tests.recorder import Event

_ROUND = 0.01


@dataclass(frozen=True)
class Open:
    """A body that runs."""

    pid: int
    task: str
    task_id: str
    label: str
    entered: float
    seconds: float

    @property
    def left(self) -> float:
        """Seconds it has still to work, if it is let."""
        return self.entered + self.seconds - now()


class Watch:
    """A thread that reads what the workers write and writes down who dies."""

    def __init__(self, path: str, record: Record) -> None:
        self._reader, self._record = Reader(path), record
        self._began: dict[str, Event] = {}
        self._open: dict[str, Open] = {}
        self._descriptors: dict[int, int] = {}
        self._poll = select.poll()
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
        """Those that run now."""
        return list(self._open.values())

    def pids(self) -> list[int]:
        """All pool children that have begun a task and live."""
        return list(self._descriptors.values())

    def _run(self) -> None:
        while not self._over.wait(_ROUND):
            # Whoever lives now was alive when this round began.
            began = now()
            self._note_the_dead()
            self._round_began = began
            for event in self._reader.unread():
                self.events.append(event)
                self._follow(event)

    def _follow(self, event: Event) -> None:
        if event.name == "began":
            self._began[event.run] = event
            self._look_after(event.pid)
        elif event.name == "enter" and event.pid in self._descriptors.values():
            # Else it has died before this could be read.
            facts = self._began[event.run].facts
            self._open[event.run] = Open(
                event.pid, facts["task"], facts["task_id"], event.key, event.at, event.facts["seconds"]
            )
        elif event.name in ("leave", "ended"):
            self._open.pop(event.run, None)

    def _look_after(self, pid: int) -> None:
        if pid in self._descriptors.values():
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._bury(pid)
            return
        self._descriptors[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)

    def _note_the_dead(self) -> None:
        for descriptor, _ in self._poll.poll(0):
            self._poll.unregister(descriptor)
            os.close(descriptor)
            self._bury(self._descriptors.pop(descriptor))

    def _bury(self, pid: int) -> None:
        self._record.write("died", victim=pid, alive_at=self._round_began)
        for run in [run for run, body in self._open.items() if body.pid == pid]:
            del self._open[run]
