"""End the body of a lost lease: raise an exception in it, or have the kernel kill its process.

In the main thread a signal handler raises the exception, which also ends a sleep or a blocking read. In another thread
CPython raises it between two bytecodes, so a sleep or a call into C ends first. In a greenlet the hub raises it.

An event loop of asyncio only logs an exception that hits a callback, and the body would go on. So each loop cancels the
tasks of the body. In the thread of a loop an exception is raised only if the loop is silent for some seconds.
"""

import asyncio
import ctypes
import gc
import mmap
import os
import signal
import struct
import sys
import threading
import time
from _queue import Empty, SimpleQueue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import Context
from itertools import chain, repeat
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from celery_singleton_lock.errors import ConfigurationError, LockLost, LostReason
from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.lease import current
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.threads import call_in_hub, patched_by, running_loop

if TYPE_CHECKING:
    from celery_singleton_lock.leases.holding import Holding

Loop = asyncio.AbstractEventLoop

# A real-time signal that applications rarely use. macOS has none, and glibc uses the first few.
_SIGNAL: int = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else 0

# `signal.getsignal` is slow, because it makes an enum.
_handler_of: Callable[[int], Any] = sys.modules["_signal"].getsignal

# For each try, in seconds: the longest wait for event loops, and the pause after it.
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, *[1.0] * 5)
# The pause of all later tries. Each of them looks for event loops among all objects of the process.
_LATER_PAUSE = 5.0
# In the first tries, nothing is raised while a loop does not answer, or while cancelled tasks may be cleaning up.
# Otherwise the exception could interrupt the cleanup.
_CAREFUL_TRIES = 5
# Seconds that a body has to clean up before the log warns.
_TOLD_AFTER = 10.0

_sent: deque["Interrupt"] = deque()


class Interrupt:
    """Interrupts the body in its `with` block, at most once."""

    # The exception was raised, or tasks were cancelled. The body may have caught it.
    delivered = False
    _has_reached_its_thread = False  # this ends the tries
    _thread: int | None = None
    _greenlet: Any = None
    _error: LockLost | None = None

    def __enter__(self) -> None:
        self._guard = threading.Lock()
        thread = threading.get_ident()
        if patched_by() is not None:
            self._greenlet = sys.modules["greenlet"].getcurrent()
            # Find the hub in the body's thread. `on_lost` may run in a thread with another hub.
            self._call_in_hub = call_in_hub()
        elif _SIGNAL and _handler_of(_SIGNAL) is not _deliver and _hears_signals(thread):
            signal.signal(_SIGNAL, _deliver)
        self._outer_loop = running_loop()
        self._thread = thread

    def __exit__(self, *_: object) -> None:
        thread = self._thread
        self._thread = None
        if self._error is not None:
            # Drop an error that `_insist` raised just as the body ended. Otherwise the next run would get the error.
            with self._guard:
                if thread is not None and self._greenlet is None and not _hears_signals(thread):
                    _replace_what_was_raised_here()

    def on_lost(self, lease: "Holding", reason: LostReason) -> None:
        # A `DeadMan` kills the process of a lost lease.
        if self._thread is None or (lease.deadman is not None and not lease.is_kept):
            return
        with self._guard:
            if self._thread is None:
                return
            self._lease = lease
            self._cancelled_in = set[Loop]()
            self._error = LockLost(lease.key, reason)
            if self._greenlet is not None:
                self._call_in_hub(self.deliver)
            else:
                threading.Thread(target=self._insist, args=(self._thread,), daemon=True).start()
        background.submit(self._tell_if_it_goes_on, _TOLD_AFTER)

    def _insist(self, thread: int) -> None:
        for number, pause in enumerate(chain(_PAUSES, repeat(_LATER_PAUSE))):
            threads, are_silent = self._ask_loops(pause)
            with self._guard:
                if self._thread is None or self._has_reached_its_thread:
                    return
                is_careful = number < _CAREFUL_TRIES and (are_silent or self._cancelled_in)
                if thread not in threads and not is_careful:
                    self._ask_for_delivery(thread)
            time.sleep(pause)

    def _ask_loops(self, seconds: float) -> tuple[set[int], bool]:
        """Cancel the body's tasks. Returns the threads whose event loops answer, and whether a loop is silent."""
        answers: SimpleQueue[tuple[Loop, int]] = SimpleQueue()
        asked = list[Loop]()
        for loop in _loops_that_run():
            if loop is not self._outer_loop:
                # The loop may be of any library, and may just have been closed.
                with suppress(Exception):
                    loop.call_soon_threadsafe(self._cancel_tasks, loop, answers.put)
                    asked.append(loop)
        give_up_at = time.monotonic() + seconds
        thread_of = dict[Loop, int]()
        with suppress(Empty):
            while len(thread_of) < len(asked):
                loop, thread = answers.get(timeout=max(0.0, give_up_at - time.monotonic()))
                thread_of[loop] = thread
        return set(thread_of.values()), any(loop.is_running() for loop in asked if loop not in thread_of)

    def _cancel_tasks(self, loop: Loop, hear: Callable[[tuple[Loop, int]], object]) -> None:
        thread = threading.get_ident()
        # A second cancellation would interrupt the cleanup.
        if self._thread is not None and loop not in self._cancelled_in:
            main = _main_task() if thread == self._thread else None
            tasks = [task for task in asyncio.all_tasks(loop) if task is main or self._is_of_body(task)]
            for task in tasks:
                task.cancel("the lock of the run is lost")
            if tasks:
                self._cancelled_in.add(loop)
                self.delivered = True
                self._has_reached_its_thread = self._has_reached_its_thread or thread == self._thread
        hear((loop, thread))

    def _is_of_body(self, task: Any) -> bool:
        # Python 3.11 has no `get_context`. There, the first context that the task refers to is its own.
        found = [task.get_context()] if hasattr(task, "get_context") else gc.get_referents(task)
        context = next((each for each in found if type(each) is Context), None)
        return context is not None and any(lease() is self._lease for lease in context.get(current, ()))

    def _ask_for_delivery(self, thread: int) -> None:
        if _hears_signals(thread):
            _sent.append(self)
            # A signal just before a system call does not end that call, but the signal of the next try does.
            signal.pthread_kill(thread, _SIGNAL)
        elif not _starts_another(thread):
            _raise_in(thread, self._class())

    def deliver(self) -> None:
        """Raise the error in the body. Its thread calls this, or the hub of its greenlet."""
        # Not under the guard: a signal handler that interrupts `__exit__` would deadlock.
        if self._thread is None or self._error is None or self._has_reached_its_thread:
            return
        self.delivered = self._has_reached_its_thread = True
        if self._greenlet is not None:
            self._greenlet.throw(self._error)
        else:
            raise self._error

    def _class(self) -> type[Exception]:
        """A class that returns the error when called, because CPython raises only classes in other threads."""
        error = cast("LockLost", self._error)

        # If the thread is handling another exception, CPython 3.11 calls the class again, with the error as argument.
        def deliver(_: type[Exception], *_again: object) -> Exception:
            # For a moment, CPython gives a new thread the id of the thread that starts it. So the error may be raised
            # in a thread that the body has just started. The next try then reaches the body.
            if threading.get_ident() == self._thread:
                self.delivered = self._has_reached_its_thread = True
            return error

        return type(type(error).__name__, (type(error),), {"__new__": deliver})

    def _tell_if_it_goes_on(self) -> None:
        if self._thread is not None and self._error is not None:
            who = {"key": self._error.key, "task_id": self._lease.task_id, "reason": self._error.reason}
            why = "it has caught the exception, or cleans up" if self.delivered else "it could not be interrupted yet"
            log.warning("lock.goes_on", "the body should have ended, and still runs: %s", why, **who)


def _loops_that_run() -> Iterator[Loop]:
    # Only the garbage collector knows the loops of all threads.
    kinds: list[type] = [Loop]
    for kind in kinds:
        kinds += set[type](kind.__subclasses__()) - set(kinds)
    # Not `gc.get_objects`: it also returns tuples that other threads are building, which would get a SystemError.
    for each in gc.get_referrers(*kinds):
        if isinstance(each, Loop):
            with suppress(Exception):
                if each.is_running():
                    yield each


def _main_task() -> "asyncio.Task[Any] | None":
    """The task that `asyncio.Runner` runs in this thread, found by the frame of `run`.

    Do not look for the lease in the task's context: a reused `Runner` keeps the context of an earlier body.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 (there is no other way)
    while frame is not None and frame.f_code is not asyncio.Runner.run.__code__:
        frame = frame.f_back
    return frame and frame.f_locals.get("task")


def _hears_signals(thread: int) -> bool:
    return bool(_SIGNAL) and thread == threading.main_thread().ident


def _deliver(_number: int, _frame: FrameType | None) -> None:
    # Not `while _sent`: a second signal may empty it before `popleft`.
    with suppress(IndexError):
        while True:
            _sent.popleft().deliver()


def _starts_another(thread: int) -> bool:
    """Whether the thread is starting another. An exception would make it hang in CPython 3.11."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (there is no other way)
    while frame is not None:
        if frame.f_code is threading.Thread.start.__code__ and frame.f_locals["self"].ident is None:
            return True
        frame = frame.f_back
    return False


def _raise_in(thread: int, error: type[Exception]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


class _InItsPlace(Exception):
    pass


def _replace_what_was_raised_here() -> None:
    """Drop an error that was raised in this thread and has not arrived yet."""
    # CPython keeps one error for each thread, so a new error replaces the old one. Do not set NULL instead. Otherwise
    # CPython 3.11 would look for an error at each function call, and hang under coverage or a debugger.
    with suppress(_InItsPlace):
        _raise_in(threading.get_ident(), _InItsPlace)


_LIBC = ctypes.CDLL(None, use_errno=True)
_TIMER_ABSTIME = 1
_NO_TIMER = ctypes.c_void_p(-1).value
# `struct sigevent`: a value, the signal, and SIGEV_SIGNAL.
_KILL = struct.pack("Pii48x", 0, signal.SIGKILL, 0)

# The pid and the deadline of each process. The main process shares this memory, to report children that were killed.
_ENTRY = struct.Struct("qd")
_ENTRIES = 1 << 16
_deadlines = mmap.mmap(-1, _ENTRIES * _ENTRY.size)
_NO_DEADLINE = float("inf")


def _write(deadline: float) -> None:
    pid = os.getpid()
    _ENTRY.pack_into(_deadlines, pid % _ENTRIES * _ENTRY.size, pid, deadline)


def has_fired(pid: int, at: float) -> bool:
    """Whether the timer killed a process that was found dead at *at*, on CLOCK_BOOTTIME."""
    owner, deadline = _ENTRY.unpack_from(_deadlines, pid % _ENTRIES * _ENTRY.size)
    return bool(owner == pid and deadline <= at)


class DeadMan:
    """A kernel timer that kills this process. Timers are scarce, so call `disarm`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._over = False
        # `timer_create` writes the number here, so no timer is lost if a signal handler raises.
        self._timer = ctypes.c_void_p(_NO_TIMER)

    def arm(self, deadline: float) -> None:
        """Kill this process at *deadline*, on CLOCK_BOOTTIME."""
        if self._over:
            return
        timer = ctypes.byref(self._timer)
        if self._timer.value == _NO_TIMER and _LIBC.timer_create(time.CLOCK_BOOTTIME, _KILL, timer) != 0:
            raise ConfigurationError(f"lock_on_lost='kill' is not possible: {os.strerror(ctypes.get_errno())}")
        _write(deadline)
        # `struct itimerspec`: no interval, then seconds and nanoseconds.
        spec = struct.pack("4l", 0, 0, int(deadline), int(deadline % 1 * 1_000_000_000))
        _LIBC.timer_settime(self._timer, _TIMER_ABSTIME, spec, None)
        if self._over:
            # Another thread has called `disarm` meanwhile.
            self.disarm()

    def disarm(self) -> None:
        self._over = True
        # A forked child may have another timer of this number.
        if self._timer.value != _NO_TIMER and self._pid == os.getpid():
            _LIBC.timer_delete(self._timer)
            self._timer.value = _NO_TIMER
            _write(_NO_DEADLINE)

    def kill(self) -> None:
        """Kill this process. `has_fired` stays False, because the loss was reported already."""
        _write(_NO_DEADLINE)
        os.kill(os.getpid(), signal.SIGKILL)

    __del__ = disarm
