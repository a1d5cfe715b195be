"""Where the processes of a worker are that does not end; Celery and billiard hang by themselves as well."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from tests.fire.stage import Host
from tests.waiting import until

_OURS = "/celery_singleton_lock/"


def hangs_in_the_lock(host: Host, children: Iterable[int]) -> bool:
    """Have all its processes write their stacks to its log; whether the main thread of any is in our code."""
    send(host.worker.pid, signal.SIGUSR2)
    with suppress(AssertionError):
        until(lambda: "in _run_module_as_main" in _last_dump(host.worker.log()), "it tells where it is", timeout=5)
    log = host.worker.log()
    for pid in children:
        if group_of(pid) == host.worker.pid:
            send(pid, signal.SIGUSR2)
    time.sleep(1.0)
    dumps = [_last_dump(log), *host.worker.log()[len(log) :].split("Current thread")[1:]]
    return any(_OURS in dump for dump in dumps)


def send(pid: int, number: int) -> None:
    """Send a signal, if the process is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def group_of(pid: int) -> int:
    """Its process group, which is the pid of its worker; 0 if it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _last_dump(log: str) -> str:
    """Of the thread that got the signal, which is the main one; the others are written before it."""
    return log.rpartition("Current thread")[2]
