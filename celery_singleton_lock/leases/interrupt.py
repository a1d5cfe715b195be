"""Raise an exception inside a body that is running, from another thread.

In the main thread a signal does it, which also ends a sleep or a blocking
read. In any other thread CPython can be asked to raise between two bytecodes:
a sleep or a call into C ends first. gevent and eventlet can throw it into a greenlet as
soon as their event loop runs: a computation without a pause ends first.

An event loop of asyncio in a body catches what one of its tasks or callbacks
raises, and goes on with the others. So the loop gets a moment to become idle, or to end
because of the exception. After that the exception is raised between two callbacks,
where the loop does not catch it.
"""

import ctypes
import importlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from celery_singleton_lock.leases.event_loop import (
    call_uncaught,
    callback_around,
    is_what_the_loop_runs_for,
)
from celery_singleton_lock.leases.greenlets import call_soon, current
from celery_singleton_lock.leases.new_thread import end_start_of, started_by

# Celery and billiard use TERM, QUIT, INT, HUP, USR1 and USR2. Applications rarely
# touch the real-time signals, and glibc keeps the first few of them for itself.
_SIGNAL: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None

# Not `signal.getsignal`, which makes an enum of each answer: this is called before each body.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal

# Seconds until a signal that was not heard is sent again.
_AGAIN = 0.05
# Seconds for which an event loop may go on with its callbacks until it waits, or may go on after a callback has
# swallowed the exception.
_PATIENCE_WITH_A_LOOP = 1.0
# Seconds for which a new thread may take to begin.
_PATIENCE_WITH_A_THREAD = 2.0

_sent: deque["Interrupt"] = deque()


class Interrupt:
    """One body that can be interrupted once, and only while it runs.

    Attributes:
        delivered: The exception was raised in the body, whether the body has caught it or not.
    """

    delivered = False
    _thread: int | None = None
    _greenlet: Any = None
    _error: Exception | None = None
    _held_back = False
    _kept: Exception | None = None
    _outer_callback: FrameType | None = None
    _spares_until = 0.0
    _rests_until = 0.0
    _has_landed = False
    _is_raised = False
    _ends_loop_at = 0.0
    _will_end_loop = False
    _child: threading.Thread | None = None
    _child_is_due = 0.0

    def __init__(self) -> None:
        self._guard = threading.Lock()

    def allowed(self) -> "_Allowed":
        """Let `send` reach the code inside."""
        return _Allowed(self)

    def begin(self) -> None:
        """From now on, `send` reaches the code that runs."""
        self._greenlet = current()
        if self._greenlet is None and threading.current_thread() is threading.main_thread():
            _listen()
        self._outer_callback = callback_around(sys._getframe())  # noqa: SLF001 (there is no other way)
        self._thread = threading.get_ident()

    def end(self) -> None:
        """From now on, `send` reaches nothing."""
        with self._guard:
            thread, self._thread, self._outer_callback = self._thread, None, None
            if thread is not None and self._error is not None and self._greenlet is None and not _is_main(thread):
                _raise_in(thread, None, self)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Keep an exception that is sent until the code inside has returned; drop it if that code raises."""
        self._held_back = True
        try:
            yield
        finally:
            # Under the guard, because `send` may be deciding now.
            with self._guard:
                self._held_back = False
        if self._kept is not None:
            self.lands(sys._getframe())  # noqa: SLF001 (there is no other way)
            raise self._kept

    def send(self, error: Exception) -> bool:
        """Raise *error* in the body; False if it is not running or cannot be reached."""
        with self._guard:
            thread = self._thread
            if thread is None:
                return False
            self._error = error
            self._spares_until = time.monotonic() + _PATIENCE_WITH_A_LOOP
            if self._held_back:
                self._kept = error
                return True
            if self._greenlet is not None:
                call_soon(self.deliver_to_greenlet)
                return True
            by_signal = _SIGNAL is not None and _is_main(thread)
            if by_signal:
                _sent.append(self)
            if not self._raise(thread, by_signal):
                return False
        threading.Thread(target=self._insist, args=(thread, by_signal), daemon=True).start()
        return True

    def _raise(self, thread: int, by_signal: bool) -> bool:
        if by_signal and _SIGNAL is not None:
            signal.pthread_kill(thread, _SIGNAL)
            return True
        child = started_by(thread)
        if child is not None and not self._is_overdue(child):
            # Until the new thread runs, CPython takes it for its parent, and would raise the error in the new thread.
            return True
        self._is_raised = True
        is_raised = _raise_in(thread, self._error, self)
        if child is not None:
            # Only now, so that the body does not go on with a thread that has never begun.
            end_start_of(child)
        return is_raised

    def _is_overdue(self, child: threading.Thread) -> bool:
        """*child* should have begun long ago: it may have got the exception as it was made, and have died."""
        if child is not self._child:
            self._child, self._child_is_due = child, time.monotonic() + _PATIENCE_WITH_A_THREAD
        return time.monotonic() > self._child_is_due

    def _insist(self, thread: int, by_signal: bool) -> None:
        """Raise it until it has landed."""
        while True:
            time.sleep(_AGAIN)
            with self._guard:
                if not self.is_under_way:
                    return
                # A signal that comes just before a call into the kernel does not end that.
                if by_signal or not self._is_raised or (self.delivered and time.monotonic() > self._rests_until):
                    self._raise(thread, by_signal)

    @property
    def was_sent(self) -> bool:
        """It was raised in the body, or held back for good because the code inside has raised by itself."""
        return self.delivered or self._kept is not None

    @property
    def is_under_way(self) -> bool:
        """It was sent, and has neither landed nor come too late."""
        return self._thread is not None and self._error is not None and not self._has_landed

    def deliver_to_greenlet(self) -> None:
        """Throw what was sent into the greenlet of the body, if it still runs; called by the event loop."""
        if error := self._due():
            self.lands(None)
            self._greenlet.throw(error)

    def due_in(self, frame: FrameType | None) -> Exception | None:
        """The exception to raise in *frame*, which the thread of the body runs now; None for none."""
        now = time.monotonic()
        if now < self._rests_until:
            return None
        if now < self._spares_until and self._would_be_swallowed(frame):
            self._end_the_loop_at(self._spares_until)
            return None
        error = self._due()
        if error is not None:
            self.lands(frame)
        return error

    def arrives(self, frame: FrameType | None) -> None:
        """A thread has got the exception; if it is one that the body has just started, send it once more."""
        # Until a new thread runs, CPython takes it for its parent, though `start` may have returned already.
        self._is_raised = threading.get_ident() == self._thread
        if self._is_raised:
            self.lands(frame)

    def lands(self, frame: FrameType | None) -> None:
        """The exception is being raised in *frame*."""
        is_first, self.delivered = not self.delivered, True
        self._has_landed = not self._would_be_swallowed(frame)
        # The loop gets time to end by itself, because it may be waiting for the task that was hit.
        self._rests_until = time.monotonic() + _PATIENCE_WITH_A_LOOP
        if is_first and not self._has_landed:
            self._end_the_loop_at(self._rests_until)

    def _end_the_loop_at(self, moment: float) -> None:
        """At that moment raise the exception where the running loop does not catch it."""
        self._ends_loop_at = moment
        if not self._will_end_loop:
            self._will_end_loop = call_uncaught(moment - time.monotonic(), self._end_the_loop)

    def _end_the_loop(self) -> None:
        self._will_end_loop = False
        if not self.is_under_way:
            return
        if time.monotonic() < self._ends_loop_at:
            self._end_the_loop_at(self._ends_loop_at)
        elif error := self._due():
            self.lands(sys._getframe())  # noqa: SLF001 (there is no other way)
            raise error

    def _would_be_swallowed(self, frame: FrameType | None) -> bool:
        callback = callback_around(frame)
        return callback is not None and callback is not self._outer_callback and not is_what_the_loop_runs_for(callback)

    def _due(self) -> Exception | None:
        # No lock here: the thread that runs this may hold the guard already.
        if self._thread is None:
            return None
        if self._held_back:
            self._kept = self._error
            return None
        return self._error


class _Allowed:
    __slots__ = ("_interrupt",)

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt

    def __enter__(self) -> None:
        self._interrupt.begin()

    def __exit__(self, *_: object) -> None:
        self._interrupt.end()


def _is_main(thread: int) -> bool:
    return thread == threading.main_thread().ident


def _listen() -> None:
    if _SIGNAL is not None and _handler_of(_SIGNAL) is not _deliver:
        signal.signal(_SIGNAL, _deliver)


def _deliver(_number: int, frame: FrameType | None) -> None:
    for one in tuple(_sent):
        error = one.due_in(frame)
        if not one.is_under_way:
            # Another signal may have come in between.
            with suppress(ValueError):
                _sent.remove(one)
        if error is not None:
            raise error


def _raise_in(thread: int, error: Exception | None, interrupt: Interrupt) -> bool:
    """Raise *error* in the thread, or take back what has not been raised there yet."""
    delivery = ctypes.py_object(_class_of(error, interrupt)) if error is not None else None
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), delivery))


def _class_of(error: Exception, interrupt: Interrupt) -> type[Exception]:
    """A class whose only instance is *error*, because CPython takes a class here and calls it."""

    # While another exception is handled, CPython 3.11 calls it once more, with the instance.
    def deliver(_: type[Exception], *_again: object) -> Exception:
        # A thread that has just begun has no outer frame.
        interrupt.arrives(sys._getframe().f_back)  # noqa: SLF001 (there is no other way)
        return error

    return type(type(error).__name__, (type(error),), {"__new__": deliver})
