"""Raise an exception inside a body that is running, from another thread.

In the main thread a signal does it, which also ends a sleep or a blocking read. In any other thread CPython can be
asked to raise between two bytecodes: a sleep or a call into C ends first. gevent and eventlet can throw it into a
greenlet as soon as their event loop runs: a computation without a pause ends first.

Nothing is raised in a thread that runs an event loop of asyncio. A callback of the loop could get the exception: the
loop would log it, and the body would go on. So each loop of the process cancels the tasks of the body; in a loop of
another thread as well, because the body may wait for them. A task is the body's if its context has the body's lease.
"""

import asyncio
import ctypes
import gc
import importlib
import logging
import signal
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

from celery_singleton_lock.leases.background import background
from celery_singleton_lock.leases.lease import current, running_loop
from celery_singleton_lock.log import log
from celery_singleton_lock.stores.threads import call_soon, hub, patched_by
from celery_singleton_lock.stores.threads import current as current_greenlet

if TYPE_CHECKING:
    from celery_singleton_lock.errors import LockLost
    from celery_singleton_lock.leases.holding import Holding

Loop = asyncio.AbstractEventLoop

# Celery, billiard and applications rarely touch the real-time signals; glibc keeps the first few for itself.
_SIGNAL: int | None = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else None

# Not `signal.getsignal`, which makes an enum of each answer: this is called before each body.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal

# Seconds for which each try to reach a body waits for the answers of event loops, and then for its effect.
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, *[1.0] * 5)
# Tries before something is raised beside an event loop that does not answer, or whose tasks of the body are ending.
_CAREFUL_TRIES = 5
# Seconds after which the log says that a body goes on; for a body that ends in its own way they are enough.
_TOLD_AFTER = 10.0

# For the main thread.
_sent: deque["Interrupt"] = deque()


class Interrupt:
    """One body that can be interrupted once, and only inside the `with` block of this object.

    Once *delivered*, the exception was raised in the body, or tasks of it were cancelled; it may have caught that.
    """

    delivered = False
    # Nothing more is to be done: it was raised, or the event loop of the body's own thread has cancelled its tasks.
    _has_reached_its_thread = False
    _thread: int | None = None
    _greenlet: Any = None
    _hub: Any = None
    _outer_loop: Loop | None = None
    _error: "LockLost | None" = None
    _lease: "Holding"
    _guard: threading.Lock
    _cancelled_in: set[Loop]

    def __enter__(self) -> None:
        """From now on, `send` reaches the code that runs."""
        self._guard = threading.Lock()
        thread = threading.get_ident()
        if patched_by() is not None:
            self._greenlet = current_greenlet()
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

    def send(self, lease: "Holding", error: "LockLost") -> None:
        """Raise *error* in the body that runs under *lease*, if it is running."""
        if self._thread is None:
            return
        with self._guard:
            if self._thread is None:
                return
            self._lease = lease
            self._error = error
            self._cancelled_in = set()
            if self._greenlet is not None:
                call_soon(self._hub, self.deliver)
            else:
                threading.Thread(target=self._insist, args=(self._thread,), daemon=True).start()
        background.submit(self._tell_if_it_goes_on, _TOLD_AFTER)

    def _insist(self, thread: int) -> None:
        """Try to reach the body, a bounded number of times."""
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
        """Have each event loop that runs cancel the tasks of the body.

        Returns:
            The threads of the loops that answer in so many seconds, and whether others run and are silent.
        """
        answers: SimpleQueue[tuple[Loop, int]] = SimpleQueue()
        asked = list[Loop]()
        for loop in _loops_that_run():
            if self._ask(loop, answers.put):
                asked.append(loop)
        give_up_at = time.monotonic() + seconds
        thread_of = dict[Loop, int]()
        with suppress(Empty):
            while len(thread_of) < len(asked):
                loop, thread = answers.get(timeout=max(0.0, give_up_at - time.monotonic()))
                thread_of[loop] = thread
        return set(thread_of.values()), any(loop.is_running() for loop in asked if loop not in thread_of)

    def _ask(self, loop: Loop | None, hear: Callable[[tuple[Loop, int]], object] = bool) -> bool:
        """Whether the loop was asked to cancel the tasks of the body; it is not if it is the loop around the body."""
        if loop is not None and loop is not self._outer_loop:
            # A loop may be closed in this moment, and may be of any library.
            with suppress(Exception):
                loop.call_soon_threadsafe(self._cancel_tasks, loop, hear)
                return True
        return False

    def _cancel_tasks(self, loop: Loop, hear: Callable[[tuple[Loop, int]], object]) -> None:
        thread = threading.get_ident()
        # Once in each loop: the body may wait for something as it ends.
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

    def _is_of_body(self, task: "asyncio.Task[Any]") -> bool:
        context = _context_of(task)
        return context is not None and any(lease() is self._lease for lease in context.get(current, ()))

    def _ask_for_delivery(self, thread: int) -> None:
        if _SIGNAL is not None and _hears_signals(thread):
            _sent.append(self)
            # A signal that comes just before a call into the kernel does not end that; the next one does.
            signal.pthread_kill(thread, _SIGNAL)
        elif not _starts_another(thread):
            _raise_in(thread, self._class())

    def deliver(self) -> None:
        """Raise what was sent, if the body still runs; called in its thread, or by the hub of its greenlet."""
        # No lock here: the thread that runs this may hold the guard already.
        if self._thread is None or self._error is None or self._has_reached_its_thread:
            return
        if self._greenlet is not None:
            self.delivered = self._has_reached_its_thread = True
            self._greenlet.throw(self._error)
        elif not self._ask(running_loop()):
            self.delivered = self._has_reached_its_thread = True
            raise self._error

    def _class(self) -> type[Exception]:
        """A class whose only instance is the error, because CPython takes a class here and calls it."""
        error = self._error
        assert error is not None

        # While another exception is handled, CPython 3.11 calls it once more, with the instance.
        def deliver(_: type[Exception], *_again: object) -> Exception:
            # A thread that has just begun may get it in place of the body's, which is then asked again.
            if threading.get_ident() == self._thread:
                self.delivered = True
                # An event loop that has begun meanwhile may swallow it.
                self._has_reached_its_thread = not self._ask(running_loop())
            return error

        return type(type(error).__name__, (type(error),), {"__new__": deliver})

    def _tell_if_it_goes_on(self) -> None:
        if self._thread is not None and self._error is not None:
            who = {"key": self._error.key, "task_id": self._lease.task_id, "reason": self._error.reason}
            why = "it has caught its interruption" if self.delivered else "nothing could be raised in it yet"
            log.write(logging.WARNING, "lock.goes_on", "the body goes on after it was to end: %s", why, **who)


def _loops_that_run() -> Iterator[Loop]:
    """The event loops that run in this process, each in its thread; nobody but the garbage collector knows them all."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Loop)}
    for each in objects:
        if type(each) in kinds:
            with suppress(Exception):
                if each.is_running():
                    yield each


def _main_task() -> "asyncio.Task[Any] | None":
    """The task that the `asyncio.Runner` of this thread runs: its context may be that of an earlier body."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 (there is no other way)
    while frame is not None and frame.f_code is not asyncio.Runner.run.__code__:
        frame = frame.f_back
    return frame and frame.f_locals.get("task")


def _context_of(task: Any) -> Context | None:
    if hasattr(task, "get_context"):
        return cast("Context", task.get_context())
    # Before Python 3.12. The first is its own; others are those of its callbacks.
    return next((each for each in gc.get_referents(task) if type(each) is Context), None)


def _hears_signals(thread: int) -> bool:
    return _SIGNAL is not None and thread == threading.main_thread().ident


def _deliver(_number: int, _frame: FrameType | None) -> None:
    # Another signal may come in between, and take the last.
    with suppress(IndexError):
        while True:
            _sent.popleft().deliver()


def _starts_another(thread: int) -> bool:
    """Whether that thread is starting another one: CPython takes the new thread for it, and would raise there."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (there is no other way)
    while frame is not None:
        # Until the new thread has set its `ident`.
        if frame.f_code is threading.Thread.start.__code__ and frame.f_locals["self"].ident is None:
            return True
        frame = frame.f_back
    return False


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raise it in the thread, or take back what has not been raised there yet."""
    it = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), it)
