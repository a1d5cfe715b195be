"""Processor time of a process, which depends less on what else the machine does than the time by the clock."""

import time
from pathlib import Path

# How Linux names the clock of another process (CPUCLOCK_SCHED): to the nanosecond, threads that have ended included.
_SCHEDULED = 2


def seconds(pid: int) -> float:
    """Processor time of one process and its threads; NaN where the kernel does not tell (not Linux)."""
    try:
        return time.clock_gettime((~pid << 3) | _SCHEDULED)
    except (AttributeError, OSError):
        return float("nan")


def children_of(pid: int) -> list[int]:
    """All processes below that one."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        own = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [*own, *(below for child in own for below in children_of(child))]
