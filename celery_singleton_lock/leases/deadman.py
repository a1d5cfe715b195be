"""A kernel timer that kills this process at the deadline of its lease.

A heartbeat thread can be starved, and a process can be stopped or frozen, past the moment at which the store grants
the lock to somebody else. The kernel's timer cannot: it runs on CLOCK_BOOTTIME, needs no help from this process, and
SIGKILL waits for nobody, so a stopped process dies stopped and a frozen one before its next instruction.
"""

import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from functools import cache
from typing import Any

from celery_singleton_lock.errors import ConfigurationError

_TIMER_ABSTIME = 1
_NO_TIMER = ctypes.c_void_p(-1).value
_SIGEV_SIGNAL = 0

# The deadline of the timer in each process, for the main process of its pool: a process that dies by its timer can say
# nothing. They are in memory that a forked process shares with its parent; an entry is a pid and a deadline.
_ENTRY = struct.Struct("qd")
_ENTRIES = 1 << 16
_deadlines = mmap.mmap(-1, _ENTRIES * _ENTRY.size)
_NO_DEADLINE = float("inf")


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", ctypes.c_long * 2), ("it_value", ctypes.c_long * 2))


class _Sigevent(ctypes.Structure):
    _fields_ = (
        ("sigev_value", ctypes.c_void_p),
        ("sigev_signo", ctypes.c_int),
        ("sigev_notify", ctypes.c_int),
        ("_padding", ctypes.c_byte * 48),
    )


def why_unavailable() -> str | None:
    """Why this machine has no such timer, or None if it has."""
    if sys.platform != "linux":
        return f"it needs a timer of the Linux kernel, and this is {sys.platform}"
    try:
        _function("timer_create")
    except AttributeError:
        return "the C library has no timer_create"
    return None


def _write(deadline: float) -> None:
    pid = os.getpid()
    _ENTRY.pack_into(_deadlines, pid % _ENTRIES * _ENTRY.size, pid, deadline)


def has_fired(pid: int, at: float) -> bool:
    """Whether the timer of a process had reached its deadline *at* that moment on CLOCK_BOOTTIME.

    A process that was found dead at that moment was killed by its timer then. It is False for a process that had no
    timer, and for one that has told of its loss by itself.
    """
    owner, deadline = _ENTRY.unpack_from(_deadlines, pid % _ENTRIES * _ENTRY.size)
    return bool(owner == pid and deadline <= at)


class DeadMan:
    """One timer, of this process and not of its forked children.

    The kernel has a limited number of timers. So this object takes one when it is armed for the first time, and gives
    it back when it is disarmed, or when nothing refers to it any more.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._over = False
        # Written by the call itself: a signal that raises after it loses no timer.
        self._timer = ctypes.c_void_p(_NO_TIMER)
        self._spec = _Itimerspec()

    def arm(self, deadline: float) -> None:
        """Kill this process at *deadline*, seconds on CLOCK_BOOTTIME, unless armed again or disarmed before.

        Raises:
            ConfigurationError: The kernel refuses another timer.
        """
        if self._over:
            return
        if self._timer.value == _NO_TIMER:
            event = _Sigevent(None, signal.SIGKILL, _SIGEV_SIGNAL)
            if _function("timer_create")(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer)) != 0:
                raise ConfigurationError(f"lock_on_lost='kill' is not possible: {os.strerror(ctypes.get_errno())}")
        _write(deadline)
        # Seconds and nanoseconds.
        self._spec.it_value[:] = int(deadline), int(deadline % 1 * 1_000_000_000)
        _function("timer_settime")(self._timer, _TIMER_ABSTIME, ctypes.byref(self._spec), None)
        if self._over:
            # Meanwhile another thread has disarmed it.
            self.disarm()

    def disarm(self) -> None:
        """Let this process live, and give the timer back to the kernel."""
        self._over = True
        # A forked child may have a timer of its own under that number.
        if self._timer.value != _NO_TIMER and self._pid == os.getpid():
            _function("timer_delete")(self._timer)
            self._timer.value = _NO_TIMER
            _write(_NO_DEADLINE)

    def kill(self) -> None:
        """Kill this process now, after it has told of its loss."""
        _write(_NO_DEADLINE)
        os.kill(os.getpid(), signal.SIGKILL)

    __del__ = disarm


@cache
def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), name)
