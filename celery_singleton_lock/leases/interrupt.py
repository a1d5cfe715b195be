"""Raise an exception inside a body that is running, from another thread.

In the main thread a signal does it, which also ends a sleep or a blocking read. In any other thread CPython can be
asked to raise between two bytecodes: a sleep or a call into C ends first. gevent and eventlet can throw it into a
greenlet as soon as their event loop runs: a computation without a pause ends first.

If the body runs an event loop of asyncio, the tasks of the loop are cancelled instead: the loop would catch an
exception that hits one of them, and go on with the others.
"""

import asyncio
import ctypes
import importlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from celery_singleton_lock.leases.lease import running_loop
from celery_singleton_lock.stores.threads import call_soon, current, hub, patched_by

# Celery, billiard and applications rarely touch the real-time signals; glibc keeps the first few for itself.
_SIGNAL: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None

# Not `signal.getsignal`, which makes an enum of each answer: this is called before each body.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal

# Seconds until what was not delivered is sent again: twice as long each time, up to the second number.
_RETRY_AFTER = 0.05
_RETRY_AFTER_AT_MOST = 1.0

# For the main thread.
_sent: deque["Interrupt"] = deque()


class Interrupt:
    """One body that can be interrupted once, and only inside the `with` block of this object.

    Once *delivered*, the exception was raised in the body, or its tasks were cancelled; it may have caught that.
    """

    delivered = False
    _thread: int | None = None
    _greenlet: Any = None
    _hub: Any = None
    _outer_loop: asyncio.AbstractEventLoop | None = None
    _error: Exception | None = None
    _guard: threading.Lock

    def __enter__(self) -> None:
        """From now on, `send` reaches the code that runs."""
        self._guard = threading.Lock()
        thread = threading.get_ident()
        if patched_by() is not None:
            self._greenlet = current()
            self._hub = hub()
        elif _SIGNAL is not None and _handler_of(_SIGNAL) is not _deliver and _hears_signals(thread):
            signal.signal(_SIGNAL, _deliver)
        self._outer_loop = running_loop()
        self._thread = thread

    def __exit__(self, *_: object) -> None:
        """From now on, `send` reaches nothing."""
        thread = self._thread
        self._thread = None
        if self._error is not None:
            # Whoever has sent it may be about to raise it in this thread.
            with self._guard:
                if thread is not None and self._greenlet is None and not _hears_signals(thread):
                    _raise_in(thread, None)

    def send(self, error: Exception) -> None:
        """Raise *error* in the body, if it is running."""
        if self._thread is None:
            return
        with self._guard:
            if self._thread is None:
                return
            self._error = error
            if self._greenlet is not None:
                call_soon(self._hub, self.deliver)
            else:
                threading.Thread(target=self._insist, args=(self._thread,), daemon=True).start()

    def _insist(self, thread: int) -> None:
        """Ask for it until it is delivered."""
        pause = _RETRY_AFTER
        while True:
            with self._guard:
                if self._thread is None or self.delivered:
                    return
                self._ask_for_delivery(thread)
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_AFTER_AT_MOST)

    def _ask_for_delivery(self, thread: int) -> None:
        if _SIGNAL is not None and _hears_signals(thread):
            _sent.append(self)
            # A signal that comes just before a call into the kernel does not end that; the next one does.
            signal.pthread_kill(thread, _SIGNAL)
        else:
            starts_a_thread, loop = _at(thread)
            if not (starts_a_thread or self._cancels_tasks_of(loop)):
                _raise_in(thread, self._class())

    def deliver(self) -> None:
        """Raise what was sent, if the body still runs; called in its thread, or by the hub of its greenlet."""
        # No lock here: the thread that runs this may hold the guard already.
        if self._thread is None or self._error is None or self.delivered:
            return
        if self._greenlet is not None:
            self.delivered = True
            self._greenlet.throw(self._error)
        elif not self._cancels_tasks_of(running_loop()):
            self.delivered = True
            raise self._error

    def _cancels_tasks_of(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Whether the body runs this loop, which is then asked to cancel its tasks."""
        if loop is None or loop is self._outer_loop:
            return False
        # It may have been closed in between.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._cancel_tasks, loop)
        return True

    def _cancel_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        # A loop without a task is about to begin, or to end.
        if self._thread is not None and not self.delivered and (tasks := asyncio.all_tasks(loop)):
            self.delivered = True
            for task in tasks:
                task.cancel("the lock of the run is lost")

    def _class(self) -> type[Exception]:
        """A class whose only instance is the error, because CPython takes a class here and calls it."""
        error = self._error
        assert error is not None

        # While another exception is handled, CPython 3.11 calls it once more, with the instance.
        def deliver(_: type[Exception], *_again: object) -> Exception:
            # A thread that has just begun may get it in place of the body's, which is then asked again.
            self.delivered = self.delivered or threading.get_ident() == self._thread
            return error

        return type(type(error).__name__, (type(error),), {"__new__": deliver})


def _hears_signals(thread: int) -> bool:
    return _SIGNAL is not None and thread == threading.main_thread().ident


def _deliver(_number: int, _frame: FrameType | None) -> None:
    # Another signal may come in between, and take the last.
    with suppress(IndexError):
        while True:
            _sent.popleft().deliver()


def _at(thread: int) -> tuple[bool, asyncio.AbstractEventLoop | None]:
    """Whether that thread is starting another one, and the event loop that it runs."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (there is no other way)
    while frame is not None:
        # Until a new thread runs, and sets its `ident`, CPython takes it for its parent, and would raise in it.
        if frame.f_code is threading.Thread.start.__code__ and frame.f_locals["self"].ident is None:
            return True, None
        if frame.f_code is asyncio.BaseEventLoop.run_forever.__code__:
            return False, frame.f_locals["self"]
        # Loops that are not written in Python have no frames.
        if frame.f_code is asyncio.Runner.run.__code__:
            return False, frame.f_locals["self"].get_loop()
        frame = frame.f_back
    return False, None


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raise it in the thread, or take back what has not been raised there yet."""
    it = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), it)
