"""Real Celery workers: processes that a command line starts, as a user does."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from celery import Celery

from tests.forge import Started, start
from tests.recorder import Event
from tests.waiting import until


class Process:
    def __init__(self, app: str, env: dict[str, str], *command: str) -> None:
        self._log = Path(tempfile.mkstemp(prefix="celery-", suffix=".log")[1])
        self._process = start(["-A", app, *command, "--loglevel", "INFO"], env, self._log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._log.unlink()


class Worker:
    def __init__(
        self,
        app: str,
        env: dict[str, str],
        *arguments: str,
        pool: str = "prefork",
        concurrency: int = 2,
        heartbeats: bool = False,
    ) -> None:
        self._command = [
            *("-A", app, "worker", "--loglevel", "INFO"),
            *("--pool", pool, "--concurrency", str(concurrency)),
            *("--without-gossip", "--without-mingle", *([] if heartbeats else ["--without-heartbeat"]), *arguments),
        ]
        self._env = env
        self._log = Path(tempfile.mkstemp(prefix="worker-", suffix=".log")[1])
        self._process: Started | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> "Worker":
        self._process = start([*self._command, "-n", f"w{os.urandom(3).hex()}@%h"], self._env, self._log)
        return self

    def ready(self) -> "Worker":
        until(lambda: " ready." in self.log() or self._died(), "the worker is ready", timeout=60)
        assert not self._died(), self.log()
        return self

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 90) -> int:
        # At a warm shutdown, a pool process may wait 30 s for somebody to read its result.
        return self._process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL the worker and all its children at once, as if the host went away."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._log.unlink(missing_ok=True)

    def _died(self) -> bool:
        return self._process.poll() is not None


def kill_child(app: Celery, run: Event, number: int = 1) -> None:
    """SIGKILL the pool process of a run, once one of *number* workers knows that the process has taken the task.

    If two processes die at about the same time, Celery may not know yet what the second one has taken. It would run
    that task again in another process.
    """

    def is_known() -> bool:
        active = app.control.inspect(limit=number).active() or {}
        return any(request["id"] == run.run for requests in active.values() for request in requests)

    until(is_known, "its worker knows who runs it", timeout=60)
    os.kill(run.pid, signal.SIGKILL)


@contextmanager
def workers(
    app: str, env: dict[str, str] | None = None, number: int = 1, *arguments: str, **options: Any
) -> Iterator[list[Worker]]:
    started = [Worker(app, env or {}, *arguments, **options) for _ in range(number)]
    try:
        for worker in started:
            worker.start()
        yield [worker.ready() for worker in started]
    finally:
        for worker in started:
            # Pytest shows the log of a worker with a failed test.
            sys.stdout.write(worker.log())
            worker.close()


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
