"""Raise an exception inside a body that is running, from another thread.

In the main thread a signal does it, which also ends a sleep or a blocking
read. In any other thread CPython can be asked to raise between two bytecodes:
a sleep or a call into C ends first. Into a greenlet, gevent or eventlet can throw
it, once the event loop runs: one that computes without a pause ends that first.

An event loop of asyncio in a body catches what one of its tasks or callbacks
raises, and goes on with the others. So the loop is given a moment to come to
rest, or to end by what was hit, and then it is raised between two callbacks,
where the loop does not catch it.
"""

import ctypes
import gc
import importlib
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from celery_singleton_lock.leases.event_loop import (
    call_uncaught,
    callback_around,
    frame_of,
    is_what_the_loop_runs_for,
)
from celery_singleton_lock.leases.greenlets import call_soon, current

# Celery and billiard use TERM, QUIT, INT, HUP, USR1 and USR2. Applications rarely
# touch the real-time signals, and glibc keeps the first few of them for itself.
_SIGNAL: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None

# Without the enum that `signal` makes of each answer, because it is asked before each body.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal

# Seconds until a signal that was not heard is sent again.
_AGAIN = 0.05
# For so long an event loop may go on with its callbacks, until it waits; or with what it does after one has swallowed
# what was raised.
_PATIENCE_WITH_A_LOOP = 1.0

_sent: deque["Interrupt"] = deque()


class Interrupt:
    """One body that can be interrupted once, and only while it runs.

    Attributes:
        delivered: What was sent has been raised in the body, whatever that has made of it.
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

    def __init__(self) -> None:
        self._guard = threading.Lock()

    def allowed(self) -> "_Allowed":
        """Let `send` reach the code inside."""
        return _Allowed(self)

    def begin(self) -> None:
        """What runs from here on can be reached."""
        self._greenlet = current()
        if self._greenlet is None and threading.current_thread() is threading.main_thread():
            _listen()
        self._outer_callback = callback_around(sys._getframe())  # noqa: SLF001 (there is no other way)
        self._thread = threading.get_ident()

    def end(self) -> None:
        """Nothing can be reached any more."""
        with self._guard:
            thread, self._thread, self._outer_callback = self._thread, None, None
            if thread is not None and self._error is not None and self._greenlet is None and not _is_main(thread):
                _raise_in(thread, None, self)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Keep what is sent until the code inside has returned; if that raises, it stays at that."""
        self._held_back = True
        try:
            yield
        finally:
            # Not while `send` decides.
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
        if _starts_a_thread(thread):
            # Until that runs, CPython takes it for the one that has started it, and would raise in it.
            return True
        self._is_raised = True
        return _raise_in(thread, self._error, self)

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
        """What is to be raised in *frame*, to which the thread of the body has come."""
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

    def lands(self, frame: FrameType | None) -> None:
        """It is being raised in *frame*."""
        is_first, self.delivered = not self.delivered, True
        self._has_landed = not self._would_be_swallowed(frame)
        # Time for the loop to end by itself, if what was hit is what it waits for.
        self._rests_until = time.monotonic() + _PATIENCE_WITH_A_LOOP
        if is_first and not self._has_landed:
            self._end_the_loop_at(self._rests_until)

    def _end_the_loop_at(self, moment: float) -> None:
        """Raise it then where the loop whose callback runs does not catch it."""
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


def _starts_a_thread(thread: int) -> bool:
    was_enabled = gc.isenabled()
    # Python 3.11 lists the frames under a lock, which a collection that begins meanwhile may want as well.
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)  # noqa: SLF001 (there is no other way)
    finally:
        if was_enabled:
            gc.enable()
    start = frame_of(threading.Thread.start, frame)
    # Where it waits for that, the rest can be broken off; before, it has to undo what the new thread undoes as well.
    waits = start is not frame
    return start is not None and not (waits and start.f_locals["self"]._started.is_set())  # noqa: SLF001


def _listen() -> None:
    if _SIGNAL is not None and _handler_of(_SIGNAL) is not _deliver:
        signal.signal(_SIGNAL, _deliver)


def _deliver(_number: int, frame: FrameType | None) -> None:
    for one in tuple(_sent):
        error = one.due_in(frame)
        if not one.is_under_way:
            _sent.remove(one)
        if error is not None:
            raise error


def _raise_in(thread: int, error: Exception | None, interrupt: Interrupt) -> bool:
    """Raise *error* in the thread, or take back what has not been raised there yet."""
    delivery = ctypes.py_object(_class_of(error, interrupt)) if error is not None else None
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), delivery))


def _class_of(error: Exception, interrupt: Interrupt) -> type[Exception]:
    """A class whose only instance is *error*, because CPython takes a class here and calls it without arguments."""

    def deliver(_: type[Exception]) -> Exception:
        interrupt.lands(sys._getframe(1))  # noqa: SLF001 (there is no other way)
        return error

    return type(type(error).__name__, (type(error),), {"__new__": deliver})
