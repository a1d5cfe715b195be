"""Processor time of a worker, which depends less on what else the machine does than the time by the clock."""

from pathlib import Path


def seconds(pid: int) -> float:
    """Of a process, its threads and its children, to the nanosecond; NaN where the kernel does not tell (not Linux)."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        own = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return float("nan")
    return own + sum(map(seconds, children))
