"""Threads that start when they are needed, also under gevent and eventlet."""

import _thread
import asyncio
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from celery_singleton_lock.stores.clock import clock

LINGERS = 5.0  # seconds without work after which a thread ends
_LONGEST_START = 2.0

# `asyncio.get_running_loop` raises without a loop, which is slow.
running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop  # noqa: SLF001


def patched_by(what: str = "thread") -> Any:
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading" if what == "thread" else what):
        return sys.modules["gevent"]
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched(what):
        return sys.modules["eventlet"]
    return None


def waits_stop_greenlets() -> bool:
    """Sockets or `select` are not patched, so a wait for them stops all greenlets."""
    parts = [patched_by(part) is not None for part in ("socket", "select", "thread", "time")]
    return any(parts) and not all(parts[:2])


def call_in_hub() -> Callable[[Callable[[], None]], object]:
    """Eventlet allows the returned function only in the hub's own thread."""
    library = patched_by()
    if library.__name__ == "gevent":
        return cast("Callable[..., object]", library.get_hub().loop.run_callback_threadsafe)
    return partial(library.hubs.get_hub().schedule_call_global, 0)


def original(module: str, name: str) -> Any:
    if "gevent.monkey" in sys.modules:
        return sys.modules["gevent.monkey"].get_original(module, name)
    if "eventlet.patcher" in sys.modules:
        return getattr(sys.modules["eventlet.patcher"].original(module), name)
    return getattr(importlib.import_module(module), name)


class DaemonThread:
    """A thread that lives while it has work, and starts again if it has died.

    Starting takes no lock, because a signal handler that raises could leave a lock taken. If two threads start, the
    first one ends.
    """

    is_native = False  # a real thread, never a greenlet
    _running: object = None
    _begun: object = ()  # not None like `_running`, otherwise `ensure` would never start a thread
    _begins_by = 0.0
    _step: Callable[[], bool]  # False if no work has come for `LINGERS`
    _has_work: Callable[[], bool]

    def ensure(self) -> None:
        if self._begun is self._running or (self._running is not None and clock() < self._begins_by):
            return
        mark = object()
        try:
            self._begins_by = clock() + _LONGEST_START
            self._running = mark
            # `threading.Thread.start` waits for the thread. A signal handler's exception in that wait could turn into
            # another error.
            start = original("_thread", "start_new_thread") if self.is_native else _thread.start_new_thread
            start(self._live, (mark,))
        except BaseException:
            # A signal handler has raised, or no thread can start.
            self._running = None
            raise

    def _live(self, mark: object) -> None:
        # At first, CPython gives a new thread the id of the thread that started it. An asynchronous exception for the
        # starter may then be raised here, before the `try`. A later call of `ensure` then starts another thread.
        try:
            if self._running is mark:
                self._begun = mark
            while self._running is mark and (self._step() or self._has_work()):
                pass
        finally:
            if self._running is mark:
                self._running = None
            # No thread can start while the interpreter shuts down.
            with suppress(RuntimeError):
                if self._has_work():
                    self.ensure()
