"""Raise an exception inside a body that is running, from another thread.

In the main thread a signal does it, which also ends a sleep or a blocking
read. In any other thread CPython can be asked to raise between two bytecodes:
a sleep or a call into C ends first. Into a greenlet, gevent or eventlet can throw
it, once the event loop runs: one that computes without a pause ends that first.
"""

import ctypes
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from celery_singleton_lock.leases.greenlets import call_soon, current

# Celery and billiard use TERM, QUIT, INT, HUP, USR1 and USR2. Applications rarely
# touch the real-time signals, and glibc keeps the first few of them for itself.
_SIGNAL: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None

# Seconds until a signal that was not heard is sent again.
_AGAIN = 0.05

_sent: deque["Interrupt"] = deque()


class Interrupt:
    """One body that can be interrupted once, and only while it runs.

    Attributes:
        delivered: What was sent has been raised in the body, whatever that has made of it.
    """

    def __init__(self) -> None:
        self.delivered = False
        self._guard = threading.Lock()
        self._thread: int | None = None
        self._greenlet: Any = None
        self._error: Exception | None = None
        self._held_back = False
        self._kept: Exception | None = None

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let `send` reach the code inside."""
        self._greenlet = current()
        if self._greenlet is None and threading.current_thread() is threading.main_thread():
            _listen()
        self._thread = thread = threading.get_ident()
        try:
            yield
        finally:
            with self._guard:
                self._thread = None
                if self._error is not None and self._greenlet is None and not _is_main(thread):
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
            self.delivered = True
            raise self._kept

    def send(self, error: Exception) -> bool:
        """Raise *error* in the body; False if it is not running or cannot be reached."""
        with self._guard:
            thread = self._thread
            if thread is None:
                return False
            self._error = error
            if self._held_back:
                self._kept = error
                return True
            if self._greenlet is not None:
                call_soon(self.deliver_to_greenlet)
                return True
            if _SIGNAL is None or not _is_main(thread):
                return _raise_in(thread, error, self)
            _sent.append(self)
            signal.pthread_kill(thread, _SIGNAL)
        threading.Thread(target=self._signal_again, args=(thread, _SIGNAL), daemon=True).start()
        return True

    def _signal_again(self, thread: int, number: int) -> None:
        """Send the signal until it was heard: one that comes just before a call into the kernel does not end that."""
        while True:
            time.sleep(_AGAIN)
            with self._guard:
                if self._thread is None or self not in _sent:
                    return
                signal.pthread_kill(thread, number)

    def deliver_to_greenlet(self) -> None:
        """Throw what was sent into the greenlet of the body, if it still runs; called by the event loop."""
        if error := self._due():
            self._greenlet.throw(error)

    def deliver(self) -> None:
        """Raise what was sent, in the thread that runs this, if its body still runs."""
        if error := self._due():
            raise error

    def _due(self) -> Exception | None:
        # No lock here: the thread that runs this may hold the guard already.
        if self._thread is None:
            return None
        if self._held_back:
            self._kept = self._error
            return None
        self.delivered = self.delivered or self._error is not None
        return self._error


def _is_main(thread: int) -> bool:
    return thread == threading.main_thread().ident


def _listen() -> None:
    if _SIGNAL is not None and signal.getsignal(_SIGNAL) is not _deliver:
        signal.signal(_SIGNAL, _deliver)


def _deliver(_number: int, _frame: FrameType | None) -> None:
    while _sent:
        _sent.popleft().deliver()


def _raise_in(thread: int, error: Exception | None, interrupt: Interrupt) -> bool:
    """Raise *error* in the thread, or take back what has not been raised there yet."""
    delivery = ctypes.py_object(_class_of(error, interrupt)) if error is not None else None
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), delivery))


def _class_of(error: Exception, interrupt: Interrupt) -> type[Exception]:
    """A class whose only instance is *error*, because CPython takes a class here and calls it without arguments."""

    def deliver(_: type[Exception]) -> Exception:
        interrupt.delivered = True
        return error

    return type(type(error).__name__, (type(error),), {"__new__": deliver})
