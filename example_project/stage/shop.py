"""One shop as processes: two workers, a beat and its story, on a database of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from example_project.stage.history import History, Run
from example_project.stage.records import Records
from example_project.stage.story import KEYS, LAMPS

_ROOT = Path(__file__).resolve().parents[2]
_CELERY = ("-m", "celery", "-A", "example_project.app")
# Seconds; the run is well under way, and does not end soon.
_BEFORE_THE_KILL = 0.5
_LONGEST_GOODBYE = 5.0


class Shop:
    """A shop that can be opened, followed and closed.

    Arguments:
        locked: With the lock or without.
        url: Its database.
        logs: Directory for what its processes say.
    """

    def __init__(self, *, locked: bool, url: str, logs: Path) -> None:
        self.history = History(locked=locked, keys=KEYS)
        self._lock = "on" if locked else "off"
        self._url, self._logs = url, logs
        self._records = Records(url)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def playing(self) -> bool:
        return self.processes["story"].poll() is None

    def open(self) -> None:
        for name in ("one", "two"):
            options = ("--concurrency=2", "--without-mingle", "--without-gossip", "--loglevel=INFO")
            self._start(name, *_CELERY, "worker", "-n", f"{name}@%h", *options)
        self._start("story", "-m", "example_project.stage.story")

    def follow(self) -> None:
        """Read what is new, and do what is due."""
        self.catch_up()
        if self.history.opened and "beat" not in self.processes:
            # Not before there are workers, which would run all earlier calls at once.
            self._start("beat", *_CELERY, "beat", "--scheduler=celery.beat:Scheduler", "--loglevel=INFO")
        if not self.history.kills and (run := self._booking()):
            self._lose(run.worker)

    def catch_up(self) -> None:
        self.history.read(self._records.unread())

    def _start(self, name: str, *arguments: str) -> None:
        with open(self._logs / f"lock-{self._lock}-{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=_ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A process group of its own: Ctrl-C reaches only the demo, and a kill takes the pool along.
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        # A CELERY_BROKER_URL from outside would override ours, and might name a real broker.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CELERY_")}
        return {**inherited, "SHOP_BROKER_URL": self._url, "SHOP_LOCK": self._lock, "SHOP_KILL": "on"}

    def _booking(self) -> Run | None:
        """A booking of lamps that has been under way for a while."""
        runs = self.history.lanes[LAMPS].runs
        return next((run for run in runs if not run.left and run.end - run.start > _BEFORE_THE_KILL), None)

    def _lose(self, worker: str) -> None:
        _kill(self.processes[worker])
        self._records.write("killed", worker=worker)
        # An operator's look at the locks.
        self._start("list", *_CELERY, "singleton", "list")

    def listed(self) -> str:
        """What `singleton list` printed after the worker had died."""
        if "list" not in self.processes:
            return "(no worker was killed)"
        lines = (self._logs / f"lock-{self._lock}-list.log").read_text(encoding="utf-8", errors="replace")
        return lines[max(0, lines.find("LOCK ")) :].rstrip()


def close(shops: Iterable[Shop]) -> None:
    """End every process that the shops have started."""
    processes = [process for shop in shops for process in shop.processes.values()]
    for process in processes:
        process.terminate()
    patience = time.monotonic() + _LONGEST_GOODBYE
    for process in processes:
        try:
            process.wait(max(0.0, patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children. Its group exists until the wait, so no other process is hit."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
