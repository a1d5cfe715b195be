"""Starts processes of Celery quickly: a process that has already imported Celery, and nothing else, forks each of them.

That process is `python -m tests.forge`. It reads orders, and forks a `python -m celery ...` for each.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_NEEDS_A_START = {"LD_PRELOAD", "CELERY_CUSTOM_WORKER_POOL"}
"""Variables that a fork would ignore: they are read when Python starts, or when Celery is imported."""
_PATCHED = {"gevent", "eventlet"}
"""Pools before which nothing may be imported."""
_NEEDED = [
    *("celery.bin.celery", "celery.loaders.app", "celery.apps.worker", "celery.apps.beat", "celery.worker.consumer"),
    *("celery.concurrency.prefork", "celery.backends.redis", "kombu.transport.redis"),
]
"""What a worker imports in any case."""


class Forged:
    """A forked process, with the methods of a `subprocess.Popen`."""

    def __init__(self, pid: int, ended: Path) -> None:
        self.pid = pid
        self._ended = ended
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and self._ended.exists():
            self._code = int(self._ended.read_text())
            self._ended.unlink()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        give_up_at = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired("celery", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        # A process may have ended before its exit code is in the file.
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = Forged | subprocess.Popen[bytes]


def start(arguments: list[str], env: dict[str, str], log: Path) -> Started:
    """Start `python -m celery` with these arguments, in a process group of its own, with its output in *log*."""
    env = {**os.environ, **env}
    if _PATCHED & {*arguments} or _NEEDS_A_START & env.keys():
        with log.open("wb") as output:
            command = [sys.executable, "-m", "celery", *arguments]
            return subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
    return _forge().make({"arguments": arguments, "env": env, "log": str(log), "directory": str(Path.cwd())})


class _Forge:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._guard = threading.Lock()

    def make(self, order: dict[str, Any]) -> Forged:
        ended = Path(f"{order['log']}.ended")
        with self._guard:
            print(json.dumps({**order, "ended": str(ended)}), file=self._process.stdin, flush=True)
            return Forged(int(self._process.stdout.readline()), ended)


_forge = cache(_Forge)


# What follows runs in the process that forks.


def _take_orders() -> dict[str, Any]:
    """Return an order, in a child of its own, whose parent writes the exit code to a file."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if pid := os.fork():
            # Set its group before anybody knows its pid, because a test kills the whole group.
            os.setpgid(pid, pid)
            print(pid, flush=True)
            _, status = os.waitpid(pid, 0)
            fresh = Path(order["ended"]).with_suffix(".new")
            fresh.write_text(str(os.waitstatus_to_exitcode(status)))
            fresh.rename(order["ended"])
            os._exit(0)
        return order
    os._exit(0)


def _become(order: dict[str, Any]) -> None:
    with open(os.devnull) as nothing, open(order["log"], "wb") as output:
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source.fileno(), target)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = order["arguments"]


if __name__ == "__main__":
    for each in _NEEDED:
        import_module(each)
    from celery.__main__ import main

    _become(_take_orders())
    main()
