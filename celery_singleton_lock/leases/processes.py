"""The state of a process, as the kernel knows it."""

import os
from pathlib import Path

_DEAD = ("", "Z", "X")
_STOPPED = ("T", "t")


def is_dead(pid: int) -> bool:
    """It runs nothing any more."""
    return _state_of(pid) in _DEAD


def is_stopped(pid: int) -> bool:
    """It runs nothing until somebody lets it go on."""
    return _state_of(pid) in _STOPPED


def _state_of(pid: int) -> str:
    """The letter that the kernel has for its state; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "" if Path("/proc/self").exists() else _state_without_proc(pid)
    return stat.rpartition(")")[2].split()[0]


def _state_without_proc(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    return "R"
