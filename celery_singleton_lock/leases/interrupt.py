"""End the body of a lost lease: raise an exception in it, or have the kernel kill its process.

In the main thread a signal raises the exception, which also ends a sleep or a blocking read. In any other thread
CPython raises it between two bytecodes, after a sleep or a call into C. A greenlet gets it once its event loop runs.

If a callback of asyncio got the exception, the loop would log it and the body would go on. So each event loop of the
process cancels the tasks whose context has the body's lease: the body may wait for any of them. In the thread of a loop
the exception is raised only after the loop has been silent for some seconds.
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

# Applications rarely use a real-time signal. glibc keeps the first few for itself; macOS has none.
_SIGNAL: int = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else 0

# `signal.getsignal` makes an enum of its answer, too slow before each body.
_handler_of: Callable[[int], Any] = sys.modules["_signal"].getsignal

# Each try gives event loops this many seconds to answer, and then sleeps for as many.
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, *[1.0] * 5)
# In the first tries nothing is raised while an event loop is silent, or while cancelled tasks are ending.
_CAREFUL_TRIES = 5
# Seconds that a body has to clean up before the log says that it goes on.
_TOLD_AFTER = 10.0

_sent: deque["Interrupt"] = deque()


class Interrupt:
    """One body, which can be interrupted once, inside the `with` block of this object."""

    # The body got the exception, or its tasks were cancelled. The body may have caught either.
    delivered = False
    _has_reached_its_thread = False  # no further try is made
    _thread: int | None = None
    _greenlet: Any = None
    _error: LockLost | None = None

    def __enter__(self) -> None:
        self._guard = threading.Lock()
        thread = threading.get_ident()
        if patched_by() is not None:
            self._greenlet = sys.modules["greenlet"].getcurrent()
            self._call_in_hub = call_in_hub()  # a body in gevent's thread pool has a hub of its own
        elif _SIGNAL and _handler_of(_SIGNAL) is not _deliver and _hears_signals(thread):
            signal.signal(_SIGNAL, _deliver)
        self._outer_loop = running_loop()
        self._thread = thread

    def __exit__(self, *_: object) -> None:
        thread = self._thread
        self._thread = None
        if self._error is not None:
            # `_insist` may have raised the error in this thread after the body: the next run would get it.
            with self._guard:
                if thread is not None and self._greenlet is None and not _hears_signals(thread):
                    _replace_what_was_raised_here()

    def on_lost(self, lease: "Holding", reason: LostReason) -> None:
        """Raise `LockLost` in the body, if it runs and its process is not about to be killed by its timer."""
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
        for number, pause in enumerate(_PAUSES):
            threads, are_silent = self._ask_loops(pause)
            with self._guard:
                if self._thread is None or self._has_reached_its_thread:
                    return
                is_careful = number < _CAREFUL_TRIES and (are_silent or self._cancelled_in)
                if thread not in threads and not is_careful:
                    self._ask_for_delivery(thread)
            time.sleep(pause)

    def _ask_loops(self, seconds: float) -> tuple[set[int], bool]:
        """Let each event loop cancel the body's tasks; return the threads that answer, and whether a loop is silent."""
        answers: SimpleQueue[tuple[Loop, int]] = SimpleQueue()
        asked = list[Loop]()
        for loop in _loops_that_run():
            if loop is not self._outer_loop:
                # The loop may be of any library, and may be closed at this moment.
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
        # A second cancellation would strike the body as it cleans up.
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
        # Python 3.11 has no `get_context`. The first context is the task's own; its callbacks have others.
        found = [task.get_context()] if hasattr(task, "get_context") else gc.get_referents(task)
        context = next((each for each in found if type(each) is Context), None)
        return context is not None and any(lease() is self._lease for lease in context.get(current, ()))

    def _ask_for_delivery(self, thread: int) -> None:
        if _hears_signals(thread):
            _sent.append(self)
            # A signal just before a system call does not end that call. The signal of the next try does.
            signal.pthread_kill(thread, _SIGNAL)
        elif not _starts_another(thread):
            _raise_in(thread, self._class())

    def deliver(self) -> None:
        """Raise the error if the body still runs. Its thread or its greenlet's hub calls this."""
        # No guard: a signal that comes while `__exit__` has it would deadlock.
        if self._thread is None or self._error is None or self._has_reached_its_thread:
            return
        self.delivered = self._has_reached_its_thread = True
        if self._greenlet is not None:
            self._greenlet.throw(self._error)
        else:
            raise self._error

    def _class(self) -> type[Exception]:
        """A class whose only instance is the error, because CPython takes a class and calls it."""
        error = cast("LockLost", self._error)

        # While another exception is handled, CPython 3.11 calls the class once more, with the instance.
        def deliver(_: type[Exception], *_again: object) -> Exception:
            # The error may hit a thread that the body has just started. Then the next try raises it again.
            if threading.get_ident() == self._thread:
                self.delivered = self._has_reached_its_thread = True
            return error

        return type(type(error).__name__, (type(error),), {"__new__": deliver})

    def _tell_if_it_goes_on(self) -> None:
        if self._thread is not None and self._error is not None:
            who = {"key": self._error.key, "task_id": self._lease.task_id, "reason": self._error.reason}
            why = "it has caught its interruption" if self.delivered else "nothing could be raised in it yet"
            log.warning("lock.goes_on", "the body goes on after it was to end: %s", why, **who)


def _loops_that_run() -> Iterator[Loop]:
    """The event loops of all threads. Only the garbage collector knows them."""
    kinds: list[type] = [Loop]
    for kind in kinds:
        kinds += set[type](kind.__subclasses__()) - set(kinds)
    # `gc.get_objects` would refer to tuples under construction, and their threads would get a SystemError.
    for each in gc.get_referrers(*kinds):
        if isinstance(each, Loop):
            with suppress(Exception):
                if each.is_running():
                    yield each


def _main_task() -> "asyncio.Task[Any] | None":
    """`asyncio.Runner`'s task, found by frame: its context may have an earlier body's lease."""
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
    """The thread is just starting another. An exception would make it hang in CPython 3.11."""
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
    # CPython raises the last error only. NULL would drop it, too, but CPython 3.11 would then look for an error at each
    # function call, and a process that is traced, by coverage or a debugger, would look for ever.
    with suppress(_InItsPlace):
        _raise_in(threading.get_ident(), _InItsPlace)


# A kernel timer that kills this process.

_LIBC = ctypes.CDLL(None, use_errno=True)
_TIMER_ABSTIME = 1
_NO_TIMER = ctypes.c_void_p(-1).value
# `struct sigevent`: a value, the signal, and SIGEV_SIGNAL.
_KILL = struct.pack("Pii48x", 0, signal.SIGKILL, 0)

# The pid and the deadline of each process. Forked processes share this memory: the main process of a pool reports the
# loss of a child that the timer has killed.
_ENTRY = struct.Struct("qd")
_ENTRIES = 1 << 16
_deadlines = mmap.mmap(-1, _ENTRIES * _ENTRY.size)
_NO_DEADLINE = float("inf")


def _write(deadline: float) -> None:
    pid = os.getpid()
    _ENTRY.pack_into(_deadlines, pid % _ENTRIES * _ENTRY.size, pid, deadline)


def has_fired(pid: int, at: float) -> bool:
    """Whether the timer killed a process; *at* is when it was found dead, on CLOCK_BOOTTIME."""
    owner, deadline = _ENTRY.unpack_from(_deadlines, pid % _ENTRIES * _ENTRY.size)
    return bool(owner == pid and deadline <= at)


class DeadMan:
    """A timer of this process. Timers are few, so `disarm`, or the end of this object, gives it back."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._over = False
        # `timer_create` itself writes the number: if a signal raises next, no timer is lost.
        self._timer = ctypes.c_void_p(_NO_TIMER)

    def arm(self, deadline: float) -> None:
        """Kill this process at *deadline*, on CLOCK_BOOTTIME; a `ConfigurationError` if no timer is left."""
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
            # Another thread called `disarm` between these lines.
            self.disarm()

    def disarm(self) -> None:
        self._over = True
        # A forked child may have another timer of that number.
        if self._timer.value != _NO_TIMER and self._pid == os.getpid():
            _LIBC.timer_delete(self._timer)
            self._timer.value = _NO_TIMER
            _write(_NO_DEADLINE)

    def kill(self) -> None:
        """Kill this process. `has_fired` says False, so the loss is reported once."""
        _write(_NO_DEADLINE)
        os.kill(os.getpid(), signal.SIGKILL)

    __del__ = disarm
