"""Threads that start when they are needed; and what greenlets need, if gevent or eventlet has made threads such."""

import _thread
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery_singleton_lock.stores.clock import clock

_LONGEST_START = 2.0


def patched_by(what: str = "thread") -> Any:
    """The module, gevent or eventlet, that has patched *what* in this process; None if neither has."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading" if what == "thread" else what):
        return sys.modules["gevent"]
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched(what):
        return sys.modules["eventlet"]
    return None


def waits_stop_greenlets() -> bool:
    """Whether gevent or eventlet has patched this process, but not what a wait needs to let other greenlets run."""
    parts = [patched_by(part) is not None for part in ("socket", "select", "thread", "time")]
    return any(parts) and not all(parts[:2])


def hub() -> Any:
    library = patched_by()
    return library.get_hub() if library.__name__ == "gevent" else library.hubs.get_hub()


def call_soon(hub: Any, call: Callable[[], None]) -> None:
    """Have *hub* call something; with gevent from any thread, with eventlet from the hub's own."""
    if patched_by().__name__ == "gevent":
        hub.loop.run_callback_threadsafe(call)
    else:
        hub.schedule_call_global(0, call)


def current() -> Any:
    """The greenlet that runs this; None if no greenlets are in use."""
    return sys.modules["greenlet"].getcurrent() if patched_by() is not None else None


def start_native_thread(run: Callable[[], None]) -> None:
    """Run something in a thread that the greenlets of this process cannot starve."""
    original("_thread", "start_new_thread")(run, ())


def original(module: str, name: str) -> Any:
    """What *name* was before anybody patched it."""
    if "gevent.monkey" in sys.modules:
        return sys.modules["gevent.monkey"].get_original(module, name)
    if "eventlet.patcher" in sys.modules:
        return getattr(sys.modules["eventlet.patcher"].original(module), name)
    return getattr(importlib.import_module(module), name)


class DaemonThread:
    """A thread that starts when it is needed, and again if it has died.

    No lock is held: if two are started at once, the first finds that it was replaced, and ends.
    """

    _running: object = None
    _begun: object = ()
    _begins_by = 0.0

    def ensure(self) -> None:
        if self._begun is self._running or (self._running is not None and clock() < self._begins_by):
            return
        mark = object()
        try:
            self._begins_by = clock() + _LONGEST_START
            self._running = mark
            self._start(self._live, mark)
        except BaseException:
            # A signal has raised, or there are no more threads. The next call tries again.
            self._running = None
            raise

    def _live(self, mark: object) -> None:
        # Until a thread runs, CPython takes it for the one that has started it, so an exception for that one may be
        # raised here, before the `try`. Then a later call of `ensure` starts another.
        try:
            if self._running is mark:
                self._begun = mark
            while self._running is mark and self._step():
                pass
        finally:
            if self._running is mark:
                self._running = None
            # No thread can start at the end of the interpreter.
            with suppress(RuntimeError):
                if self._has_work():
                    self.ensure()

    def _start(self, run: Callable[[object], None], mark: object) -> None:
        # Not `threading.Thread`, whose start waits: a signal that raises meanwhile would become another error.
        _thread.start_new_thread(run, (mark,))

    def _step(self) -> bool:
        """Do what comes next; False to end."""
        raise NotImplementedError

    def _has_work(self) -> bool:
        raise NotImplementedError
