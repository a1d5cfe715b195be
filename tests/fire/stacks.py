"""Where the processes of a worker are that does not end, and whether that is Celery's own doing."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from tests.fire.stage import Host
from tests.waiting import until

# Where a cold shutdown hangs by itself: it waits for the rest of a message from a child that billiard has ended in the
# midst of it; or its signal came while amqp waited for an answer, which the handler, that asks as well, has read; or
# while amqp sent something, or billiard told of a result, under a lock that the handler wants as well.
IN_A_COLD_SHUTDOWN = ("_flush_outqueue", "blocking_read", "write_frame", "_set_terminated")


def hangs_in_celery(host: Host, children: Iterable[int], excuses: Iterable[str] = ()) -> bool:
    """Have all its processes write their stacks to its log, which people read as well.

    It is Celery's if the main process is in one of *excuses*, or waits for children that wait until it reads
    what they have to say at their end.
    """
    send(host.worker.pid, signal.SIGUSR2)
    with suppress(AssertionError):
        until(lambda: "in _run_module_as_main" in _last_dump(host.worker.log()), "it tells where it is", timeout=5)
    log = host.worker.log()
    for pid in children:
        if group_of(pid) == host.worker.pid:
            send(pid, signal.SIGUSR2)
    time.sleep(1.0)
    main, dumps = _last_dump(log), host.worker.log()[len(log) :]
    return any(f" in {place}\n" in main for place in excuses) or wait_for_one_another(main, dumps)


def wait_for_one_another(main: str, children: str) -> bool:
    """Billiard waits for the end of children, and each of them waits to be read."""
    dumps = children.split("Current thread")[1:]
    waits = " in join\n" in main or " in on_stop_not_started\n" in main
    return waits and bool(dumps) and all(" in put\n" in dump and "billiard" in dump for dump in dumps)


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
    return log.rpartition("Current thread")[2]
